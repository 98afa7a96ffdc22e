"""A message as it is read: text comes in pieces, deltas go out.

A syntax reads by generators that yield where they need more text. What they decide depends on the text alone, never on
the pieces that it came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from paged_kv.serve.chat.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from paged_kv.serve.chat.tools import Tool

T = TypeVar("T")
Step: TypeAlias = Generator[None, None, T]
Say: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_DELIMITERS = re.compile(r"[\s,\]}]")
_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]]*')


class Incoming:
    """The text of a message as far as it has come."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self.is_cut = False
        """True if it ended where no token was left, not by itself."""

    @property
    def rest(self) -> str:
        """The text that was not taken yet."""
        return self.text[self.at :]

    def peek(self, count: int = 1) -> Step[str]:
        """The next characters, fewer at the end."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def take(self, literal: str) -> Step[bool]:
        """Takes a text if it comes next."""
        while True:
            rest = self.text[self.at : self.at + len(literal)]
            if rest == literal:
                self.at += len(literal)
                return True
            if self.ended or not literal.startswith(rest):
                return False
            yield

    def space(self) -> Step[None]:
        """Takes white space."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.ended or self.at < len(self.text):
                return
            yield

    def until(self, marks: Sequence[str], say: Say) -> Step[str | None]:
        """Takes the text before the first of some marks, and the mark; None where none comes before the end.

        Args:
            marks: The texts that are looked for; of two that begin at one place the longer counts.
            say: Called with the text as it comes.
        """
        matcher = _marks(tuple(marks))
        while True:
            match = matcher.pattern.search(self.text, self.at) if marks else None
            if match and not self.ended and self.text[match.start() :] in matcher.beginnings:
                match = None  # it may become a longer one
            if match:
                say(self.text[self.at : match.start()])
                self.at = match.end()
                return match[0]
            rest = self.rest
            keep = 0 if self.ended else matcher.overlap(rest)
            say(rest[: len(rest) - keep])
            self.at += len(rest) - keep
            if self.ended:
                return None
            yield

    def json(self, say: Say) -> Step[bool]:
        """Takes one value of JSON, which is told as it comes; True once it is whole."""
        yield from self.space()
        depth, in_string = 0, False
        first = yield from self.peek()
        if not first or first in ",:]}":
            return False
        if first not in '{["':
            return (yield from self._scalar(say))
        while True:
            start = self.at
            while self.at < len(self.text):
                character = self.text[self.at]
                if in_string:
                    if character == "\\":
                        if self.at + 1 == len(self.text):
                            break
                        self.at += 2
                        continue
                    in_string = character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                self.at += 1
                if not in_string and depth == 0:
                    say(self.text[start : self.at])
                    return True
                match = (_IN_STRING if in_string else _OUTSIDE).match(self.text, self.at)
                self.at = match.end() if match else self.at
            say(self.text[start : self.at])
            if self.ended:
                say(self.rest)
                self.at = len(self.text)
                return False
            yield

    def _scalar(self, say: Say) -> Step[bool]:
        while (end := _DELIMITERS.search(self.text, self.at)) is None and not self.ended:
            yield
        value = self.text[self.at : end.start() if end else len(self.text)]
        self.at += len(value)
        say(value)
        try:
            json.loads(value)
        except ValueError:
            return False
        return True


class _Marks:
    """Some marks, to be looked for together: a vocabulary may have hundreds."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))
        self.beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max((len(mark) for mark in marks), default=1) - 1

    def overlap(self, text: str) -> int:
        """The length of the longest end of a text that may become a mark."""
        sizes = range(min(len(text), self._longest), 0, -1)
        return next((size for size in sizes if text[-size:] in self.beginnings), 0)


_marks = lru_cache(64)(_Marks)


class Outgoing:
    """The deltas of a message, neighbours of one kind in one.

    Args:
        tools: Those that may be called, by name.
        new_id: Makes the id of a call.
    """

    def __init__(self, tools: Mapping[str, Tool], new_id: Callable[[], str]) -> None:
        self.tools = tools
        self._new_id, self._deltas = new_id, list[Delta]()
        self._calls, self._held = 0, ""
        self._kind: type[Content | Reasoning] | None = None
        self._strips = False

    def drain(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content(self, text: str) -> None:
        """Text of the answer. White space before and after calls and thoughts is dropped."""
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        """Text of a thought. White space around it is dropped."""
        self._add(Reasoning, text)

    def end_thought(self) -> None:
        """Ends a thought."""
        self._kind, self._held, self._strips = None, "", True

    def call(self, name: str) -> None:
        """Begins a call."""
        self._kind, self._held, self._strips = None, "", True
        self._deltas.append(CallStart(self._calls, self._new_id(), name))
        self._calls += 1

    @property
    def has_calls(self) -> bool:
        """Return whether a call has begun."""
        return self._calls > 0

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        index, last = self._calls - 1, self._deltas[-1] if self._deltas else None
        if isinstance(last, CallArguments) and last.index == index:
            self._deltas[-1] = CallArguments(index, last.text + text)
        elif text:
            self._deltas.append(CallArguments(index, text))

    def drop_space(self) -> None:
        """Forgets white space that would be told with what follows, and keeps that of what follows."""
        self._held, self._strips = "", False

    def finish(self) -> None:
        """Tells the white space at the end of the answer."""
        if self._kind is Content and self._held:
            held, self._held = self._held, ""
            self._append(Content, held)

    def _add(self, kind: type[Content | Reasoning], text: str) -> None:
        if not text:
            return
        if self._kind is not kind:
            self._strips = self._strips or kind is Reasoning or self._kind is Reasoning
            self._kind, self._held = kind, ""
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        text = self._held + text
        visible = text.rstrip()
        self._held = text[len(visible) :]
        if visible:
            self._append(kind, visible)

    def _append(self, kind: type[Content | Reasoning], text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, kind):
            self._deltas[-1] = kind(last.text + text)
        else:
            self._deltas.append(kind(text))
