"""A syntax: how a kind of models writes calls of tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paged_kv.json_schemas import SchemaProblem
from paged_kv.serve.chat.grammar import SPACE, TEXT, Rules
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.thoughts import Thought
from paged_kv.serve.chat.tools import Tool


@dataclass(frozen=True)
class Asked:
    """The structure of a message.

    Args:
        tools: Those that may be called.
        is_required: Whether one must be called.
        is_parallel: Whether several may be.
        answer: The rule of the text instead of calls; None for any text.
        thought: The marks of thoughts; None where the message has none.
        is_open: Whether it begins inside a thought.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_parallel: bool = True
    answer: str | None = None
    thought: Thought | None = None
    is_open: bool = False


@dataclass(frozen=True)
class Call:
    """A call that was made, as a conversation has it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class Syntax:
    """Messages of thoughts, text and calls, where a call begins with one mark. By itself it knows no calls.

    Args:
        template: The chat template's text.
    """

    NAME: ClassVar[str] = "none"
    OPENING: ClassVar[str] = ""
    """The mark that calls begin with."""
    MARKS: ClassVar[tuple[str, ...]] = ()
    """Further marks that may be special tokens, and must be seen by the parser."""
    IS_SOUGHT: ClassVar[bool] = True
    """True if a call is found anywhere in a text, not at its beginning alone."""
    WRITES_JSON: ClassVar[bool] = True
    """True if arguments are written as JSON, so that `Tool.text_grammar` is kept."""
    HIDES_TOOLS: ClassVar[bool] = False
    """True if the template does not see the tools: `adapt` has written them."""

    def __init__(self, template: str) -> None:
        self.template = template

    @classmethod
    def is_of(cls, template: str) -> bool:
        """Return whether a template writes its calls so."""
        raise NotImplementedError

    def problem(self, parameters: Mapping[str, Any]) -> SchemaProblem | None:  # noqa: ARG002 - some syntaxes have some
        """The part of a schema of arguments to which this syntax cannot hold a model, where llguidance could."""
        return None

    def relaxed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """A schema that accepts what another does and more, to which this syntax can hold a model."""
        return parameters

    def calls(self, rules: Rules, asked: Asked) -> str:
        """The rule of calls after their opening mark."""
        raise NotImplementedError

    def start(self, rules: Rules, asked: Asked) -> str:
        """The rule of the whole message."""
        thought = thought_rule(rules, asked)
        if not asked.tools:
            return f"{thought} {asked.answer or TEXT}"
        rest = self.calls(rules, asked)
        if not asked.is_required and asked.answer is None:
            return f"{thought} ({rules.until(self.OPENING)} {rest} | {TEXT})"
        calls = f"{rules.mark(self.OPENING)} {rest}"
        return f"{thought} {calls}" if asked.is_required else f"{thought} ({calls} | {asked.answer})"

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        """Reads calls after their opening mark; False where there is none, and nothing was told."""
        raise NotImplementedError

    def read(self, text: Incoming, out: Outgoing, asked: Asked, silent: tuple[str, ...]) -> Step[None]:
        """Reads a message.

        Args:
            text: The message as it comes.
            out: Receives what was read.
            asked: What was asked for; `tools`, `thought` and `is_open` are read.
            silent: Special tokens that are not shown.
        """
        yield from read_thought_of(text, out, asked)
        opening = (self.OPENING,) if asked.tools and self.OPENING else ()
        dropped = silent + (asked.thought.dropped if asked.thought else ())
        marks = opening + tuple(mark for mark in dropped if mark not in opening)
        while (mark := (yield from text.until(marks, out.content))) is not None:
            start = text.at
            if mark in opening and not (yield from self.read_call(text, out)):
                if text.is_cut:  # no text, but a call of which too little came
                    return
                text.at = start
                out.content(mark)

    def adapt(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,  # noqa: ARG002 - some syntaxes look at them
    ) -> list[dict[str, Any]]:
        """A conversation as the template takes it."""
        return messages

    def write(self, calls: Sequence[Call]) -> str:
        """The text of calls, for templates that do not write them."""
        raise NotImplementedError

    def new_id(self) -> str:
        """The id of a new call."""
        return f"call_{secrets.token_hex(12)}"


def thought_rule(rules: Rules, asked: Asked) -> str:
    """The rule of a thought where a message may begin with one."""
    if asked.thought is None:
        return ""
    is_text = not asked.is_required and asked.answer is None
    rest = rules.until(asked.thought.closing) + ("" if is_text else f" {SPACE}")
    return rest if asked.is_open else f"({rules.mark(asked.thought.opening)} {rest})?"


def read_thought_of(text: Incoming, out: Outgoing, asked: Asked) -> Step[None]:
    """Reads the thought that a message begins with, if it does."""
    if asked.thought is None:
        return
    start = text.at
    yield from text.space()
    begins = yield from text.take(asked.thought.opening)
    if not begins and not asked.is_open:
        text.at = start
        return
    yield from text.space()
    yield from text.take(asked.thought.title)
    yield from text.until((asked.thought.closing,), out.reasoning)
    out.end_thought()


def dumps(value: Any) -> str:
    """JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)
