"""The chat format of one model: its chat template, the marks of its thoughts, and the syntax of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from paged_kv.checkpoint.source import Source
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.serve.chat.conversation import choose_syntax, read_habits, read_messages
from paged_kv.serve.chat.deltas import Delta
from paged_kv.serve.chat.grammar import Rules
from paged_kv.serve.chat.message import Incoming, Outgoing
from paged_kv.serve.chat.syntaxes import Asked, Syntax
from paged_kv.serve.chat.syntaxes.harmony import Harmony
from paged_kv.serve.chat.systems import read_systems
from paged_kv.serve.chat.template import Template
from paged_kv.serve.chat.template_files import DEFAULT, TOOL_USE, read_names, read_templates
from paged_kv.serve.chat.thoughts import Thought, read_thought
from paged_kv.serve.chat.tools import Tool, chosen_tools, read_tools
from paged_kv.structured_output import Structure


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
            raise CheckpointError(f"the chat templates are {sorted(templates)}; none is called {DEFAULT!r}")
        default = templates.get(DEFAULT) or next(iter(templates.values()))
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
        templates = read_templates(source) if template is None else {DEFAULT: template}
        return cls(templates, read_names(source), tokenizer.special_tokens) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
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
        template = self._with_tools if tools else self._default
        read = read_messages(messages, tools, template, self.syntax, self._habits, self._systems[template])
        return template.render(
            read, list(tools) if tools else None, **{"add_generation_prompt": True} | template_kwargs
        )

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
        """Refuses tools and a `tool_choice` that the model cannot be held to.

        Raises:
            ContractTypeError, ContractError: a tool or the choice is wrong, or the syntax of the model's calls is not
                known.
        """
        self._chosen(tools, choice)

    def structure(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Any,
        parallel: bool,
        answer: Structure | None,
        prompt: str = "",
        text_grammars: Mapping[str, str] = MappingProxyType({}),
    ) -> Structure | None:
        """Return what the model's message must be, for `Sampling.structured_output`; None where it may be anything.

        A required call, or the answer, begins with the first token, or after a thought where the model thinks.

        Args:
            tools: The request's tools.
            choice: "none", "auto", "required", `{"name": ...}`, or `{"names": [...], "mode": "auto" or "required"}`.
            parallel: Whether several calls may be made.
            answer: What the answer must be where it is no call.
            prompt: The rendered prompt, which may end inside a thought, or after one.
            text_grammars: Grammars of tools by name, as `Tool.text_grammar`.

        Raises:
            ContractTypeError, ContractError: as `check_tools`.
        """
        chosen, is_required = self._chosen(tools, choice)
        chosen = tuple(replace(tool, text_grammar=text_grammars.get(tool.name)) for tool in chosen)
        thought, is_open = self._thinks(prompt)
        if not chosen and (answer is None or not (thought or isinstance(self.syntax, Harmony))):
            return answer
        rules = Rules()
        rule = None if answer is None else rules.structure(answer)
        asked = Asked(chosen, is_required, parallel, rule, thought, is_open)
        return rules.grammar(self.syntax.start(rules, asked))

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str) -> MessageParser:
        """A parser of one message.

        Args:
            tools: Those that may be called; None or none where no calls are read.
            prompt: The rendered prompt.
        """
        return MessageParser(
            self.syntax, Asked(read_tools(tools), True, True, None, *self._thinks(prompt)), self._silent
        )

    def _thinks(self, prompt: str) -> tuple[Thought | None, bool]:
        """The marks of a thought where the message may begin with one, and whether it begins inside it."""
        if self._thought is None or self._thought.is_closed(prompt):
            return None, False
        return self._thought, self._thought.is_open(prompt)

    def _chosen(self, tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> tuple[tuple[Tool, ...], bool]:
        chosen, is_required = chosen_tools(read_tools(tools), choice)
        if chosen and type(self.syntax) is Syntax:
            raise ContractError("tools: this model's chat template has no calls of tools in a known syntax")
        self.syntax.check(chosen)
        return chosen, is_required


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

    def push(self, text: str) -> list[Delta]:
        """The deltas that a piece of the text completes."""
        self._text.text += text
        return self._read()

    def finish(self) -> list[Delta]:
        """The deltas at the text's end."""
        self._text.ended = True
        deltas = self._read()
        self._out.finish()
        return deltas + self._out.drain()

    def _read(self) -> list[Delta]:
        if not self._is_done:
            try:
                next(self._reading)
            except StopIteration:
                self._is_done = True
        return self._out.drain()
