"""The chat format of one model: its chat template, the marks of its thoughts, and the syntax of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from paged_kv.arguments import printable
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.source import Source
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.serve.chat.argument_checks import log_misfit
from paged_kv.serve.chat.conversation import choose_syntax, read_habits, read_messages
from paged_kv.serve.chat.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from paged_kv.serve.chat.grammar import Rules
from paged_kv.serve.chat.holding import held_together, hold
from paged_kv.serve.chat.message import Incoming, Outgoing
from paged_kv.serve.chat.syntaxes import Asked, Syntax
from paged_kv.serve.chat.syntaxes.harmony import Harmony
from paged_kv.serve.chat.systems import read_systems
from paged_kv.serve.chat.template import Template
from paged_kv.serve.chat.template_files import DEFAULT, TOOL_USE, read_names, read_templates
from paged_kv.serve.chat.thoughts import Thought, read_thought
from paged_kv.serve.chat.tools import Tool, chosen_tools, read_tools
from paged_kv.structured_output import Grammar, Structure

_BEGUN = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a content that is continued; its space shows whether the template keeps spaces at the end."""


class ChatFormat:
    """Conversations to prompts, and texts to messages, for one model.

    Args:
        templates: Chat templates by name, with `default` or one alone; `tool_use` is taken where there are tools.
        names: The special tokens that templates may name.
        special_tokens: The texts of the tokenizer's special tokens.

    Raises:
        CheckpointError: a template cannot be read, or none of several is the default.
    """

    def __init__(
        self, templates: Mapping[str, str], names: Mapping[str, str], special_tokens: frozenset[str] = frozenset()
    ) -> None:
        if DEFAULT not in templates and len(templates) != 1:
            titles = printable(", ".join(sorted(templates)))
            raise CheckpointError(f"chat templates: expected one named {DEFAULT!r}, got {titles}")
        default = templates.get(DEFAULT) or next(iter(templates.values()))
        with file_errors("the chat template cannot be used"):
            self._default = Template(default, names)
            self._with_tools = Template(templates[TOOL_USE], names) if TOOL_USE in templates else self._default
            self._systems = {template: read_systems(template) for template in {self._default, self._with_tools}}
            self._habits = read_habits(self._with_tools)
            self.syntax: Syntax = choose_syntax(self._with_tools, self._habits)
            self._thought = None if isinstance(self.syntax, Harmony) else read_thought(default)
        marks = {self.syntax.OPENING, *self.syntax.MARKS}
        if self._thought:
            marks |= {self._thought.opening, self._thought.closing}
        self.skip_special_tokens = not marks & special_tokens
        """The value that `Sampling` must have for the parser to see all marks."""
        self._silent = () if self.skip_special_tokens else tuple(sorted(special_tokens))

    @classmethod
    def read(cls, source: Source, tokenizer: Tokenizer, template: str | None = None) -> ChatFormat | None:
        """The format of a model; None where it has no chat template.

        Args:
            source: The model.
            tokenizer: The tokenizer of the model.
            template: The text of a template that is taken in place of the model's own.

        Raises:
            CheckpointError: a file or a template cannot be read.
        """
        names = read_names(source)
        if template is not None:
            return cls({DEFAULT: template}, names, tokenizer.special_tokens)
        templates = read_templates(source)
        if not templates:
            return None
        try:
            return cls(templates, names, tokenizer.special_tokens)
        except CheckpointError as error:
            raise CheckpointError(f"{source.folder}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation, up to where the model's message begins.

        Args:
            messages: As OpenAI's API has them; contents are text.
            tools: Those that the model is told of.
            template_kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            ContractTypeError, ContractError: they are no messages, or the template refuses them.
        """
        template, read, offered = self._read(messages, tools)
        return template.render(read, offered, **{"add_generation_prompt": True} | template_kwargs)

    def render_begun(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **template_kwargs: Any,
    ) -> tuple[str, str]:
        """The prompt of a conversation whose last message the model goes on with, as transformers'
        `continue_final_message` writes it: it ends with that message's content.

        Args:
            messages: As `render` has them.
            tools: As `render` has them.
            template_kwargs: Further variables of the template.

        Returns: The prompt, and the part of it that is the last message.

        Raises:
            ContractTypeError, ContractError: as `render`; or the last message has no content or has calls, or the
                template does not write its content.
        """
        template, read, offered = self._read(messages, tools)
        values = template_kwargs | {"add_generation_prompt": False}
        place, content = f"messages[{len(messages) - 1}]", read[-1]["content"]
        if not content.strip() or messages[-1].get("tool_calls"):
            raise ContractError(f"{place}: expected content and no calls in a message to continue")
        marked = [*read[:-1], read[-1] | {"content": content + _BEGUN}]
        whole, mark, rest = template.render(marked, offered, **values).rpartition(_BEGUN.strip())
        if not mark or content.strip() not in whole:
            raise ContractError(f"{place}: cannot be continued, as the chat template changes its content")
        prompt = whole if rest.startswith(_BEGUN.removeprefix(_BEGUN.strip())) else whole.rstrip()
        try:
            before = template.render(read[:-1], offered, **values | {"add_generation_prompt": True})
        except ContractError:  # some templates demand a question, or any message
            return prompt, content
        if self._thought is not None:
            before = self._thought.before(before)
        return prompt, prompt[_shared(before, prompt) :]

    def _read(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Template, list[dict[str, Any]], list[Mapping[str, Any]] | None]:
        """The template of a request, and its messages and tools as the template takes them."""
        template = self._with_tools if tools else self._default
        read = read_messages(messages, tools, template, self.syntax, self._habits, self._systems[template])
        return template, read, list(tools) if tools and not self.syntax.HIDES_TOOLS else None

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
        """Refuses malformed tools, and a `tool_choice` without its tool.

        Raises:
            ContractTypeError, ContractError: a tool or the choice is wrong.
        """
        chosen_tools(read_tools(tools), choice)

    def structure(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Any,
        parallel: bool,
        answer: Structure | None,
        prompt: str = "",
        begun: str = "",
        texts: Mapping[str, str | None] = MappingProxyType({}),
    ) -> Structure | None:
        """Return what the model's message must be, for `Sampling.structured_output`; None where it may be anything.

        A required call, or the answer, begins with the first token, or after a thought where the model thinks.

        Args:
            tools: The request's tools.
            choice: "none", "auto", "required", `{"name": ...}`, or `{"names": [...], "mode": "auto" or "required"}`.
            parallel: Whether several calls may be made; a named tool is called once all the same.
            answer: What the answer must be where it is no call.
            prompt: The rendered prompt, which may end inside a thought, or after one.
            begun: The part of the prompt that is the message itself; what follows has the structure alone.
            texts: The names of tools whose one argument is a text, each with `Tool.text_grammar`.

        Raises:
            ContractTypeError, ContractError: as `check_tools`.
            ToolSchemaError: the schema of a strict tool cannot be enforced.
        """
        chosen, is_required = chosen_tools(read_tools(tools), choice)
        chosen = tuple(tool.of_text(texts[tool.name]) if tool.name in texts else tool for tool in chosen)
        chosen = hold(chosen, self.syntax)
        thought, is_open = self._thinks(prompt, begun)
        if begun and isinstance(self.syntax, Harmony):  # it goes on inside a channel, where no call can begin
            if is_required:
                raise ContractError("tool_choice: expected none or auto where a message of this model is continued")
            return answer
        if begun and not is_open and not is_required and not self.syntax.IS_SOUGHT:  # calls come first or never
            return answer
        if not chosen and (answer is None or not (thought or isinstance(self.syntax, Harmony))):
            return answer
        parallel = parallel and not (isinstance(choice, Mapping) and "name" in choice)  # a named tool is called once

        def grammar(some: Sequence[Tool]) -> Grammar:
            rules = Rules()
            rule = None if answer is None else rules.structure(answer)
            asked = Asked(tuple(some), is_required, parallel, rule, thought, is_open)
            return rules.grammar(self.syntax.start(rules, asked))

        return held_together(chosen, grammar)

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, begun: str = "") -> MessageParser:
        """A parser of one message.

        Args:
            tools: Those that may be called; None or none where no calls are read.
            prompt: The rendered prompt.
            begun: The part of the prompt that is the message itself.
        """
        read = hold(tuple(replace(tool, is_strict=False) for tool in read_tools(tools)), self.syntax)
        thought, is_open = self._thinks(prompt, begun)
        parser = MessageParser(self.syntax, Asked(read, True, True, None, thought, is_open), self._silent)
        if begun:
            parser.skip(begun if self._thought is None else self._thought.last_part(begun))
        return parser

    def _thinks(self, prompt: str, begun: str = "") -> tuple[Thought | None, bool]:
        """The marks of a thought where the message may begin with one, and whether it begins inside it."""
        if begun and self._thought is not None:  # a text that has begun is followed by no thought
            return (self._thought, True) if self._thought.is_within(begun) else (None, False)
        if self._thought is None or self._thought.is_closed(prompt):
            return None, False
        return self._thought, self._thought.is_open(prompt)


class MessageParser:
    """Reads one message as its text comes.

    Args:
        syntax: The syntax of its calls.
        asked: Its tools and thoughts.
        silent: Special tokens that are not shown.
    """

    def __init__(self, syntax: Syntax, asked: Asked, silent: tuple[str, ...] = ()) -> None:
        self._text = Incoming()
        self._out = Outgoing({tool.name: tool for tool in asked.tools}, syntax.new_id)
        self._reading = syntax.read(self._text, self._out, asked, silent)
        self._is_done = False
        self._skipped, self._begun = "", list[Delta]()
        self._calls: list[list[str]] = []

    def skip(self, text: str) -> None:
        """Reads the beginning of the message, whose text is told no more; a call that has begun is."""
        self._begun = [each for each in self.push(text) if isinstance(each, CallStart | CallArguments)]
        self._out.drop_space()
        self._skipped = self._text.rest

    def push(self, text: str) -> list[Delta]:
        """The deltas that a piece of the text completes."""
        self._text.text += text
        return self._read()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """The deltas at the text's end; calls are then checked against their whole schemas.

        Args:
            is_cut: Whether the text ended because no token was left: what is then the beginning of a mark or of a
                call is no content.
        """
        self._text.ended, self._text.is_cut = True, is_cut
        had_calls = self._out.has_calls
        deltas = self._read()
        if is_cut and had_calls:  # nothing but a mark that is not whole is held back until here
            deltas = [delta for delta in deltas if not isinstance(delta, Content)]
        self._out.finish()
        if not is_cut:
            for name, arguments in self._calls:
                log_misfit(name, arguments, self._out.tools[name].schema)
        return deltas + self._out.drain()

    def _read(self) -> list[Delta]:
        if not self._is_done:
            try:
                next(self._reading)
            except StopIteration:
                self._is_done = True
        read = self._out.drain()
        for delta in read:
            if isinstance(delta, CallStart):
                self._calls.append([delta.name, ""])
            elif isinstance(delta, CallArguments):
                self._calls[delta.index][1] += delta.text
        deltas, self._begun = [*self._begun, *read], []
        if deltas and self._skipped:  # it could have become a mark
            first, skipped, self._skipped = deltas[0], self._skipped, ""
            if isinstance(first, Content | Reasoning):
                rest = first.text[_shared(first.text, skipped) :]
                deltas[:1] = [replace(first, text=rest)] if rest else []
        return deltas


def _shared(first: str, second: str) -> int:
    """The number of characters with which two texts both begin."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
