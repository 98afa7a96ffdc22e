"""Limits of one rendering: how many operations a chat template takes, for how long, and how much text it makes.

A template is a program, and comes with a model from anybody. Its operations are counted as they are made, and the size
of what one makes is known, or bounded, before it is made: an allocation that fails would end the process. Nothing here
needs a thread or a signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2.runtime import markup_join
from jinja2.utils import Namespace

OPERATIONS, OPERATIONS_OF_SIZE = 250_000, 64
"""Iterations with their statements, calls and filters that any conversation may take, and more for each of its size."""
CHARACTERS, CHARACTERS_OF_SIZE = 8 << 20, 256
"""Characters that all values together may have."""
SECONDS, SECONDS_OF_SIZE = 3.0, 1e-5
"""Seconds after which the thread's own time is measured, and such seconds that it may take from then on: a machine that
is busy with other things ends no rendering. To ask for a thread's time takes milliseconds on some systems.
"""
MOST_BITS = 1 << 16
"""The bits of an integer at most: all operations on it are quick."""
ENTRY = 8
"""A value in a list or a dictionary counts as so many characters."""
_LOOK = 256
"""Operations between two looks at the clock."""
_SHORT = 256
"""Shorter strings are not counted: there are no more of them than operations, and than entries that hold them."""
_LONG = 4096
_DEPTH = 1000
_TUPLE_DEPTH, _TUPLE_ENTRIES = 64, 10_000
"""A tuple is hashed, which takes stack for its depth and time for its entries, unchecked."""

_SCALARS = frozenset({int, float, bool, type(None)})
_SEQUENCES: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(Exception):
    """A rendering takes more than its limit."""


class Budget:
    """The rest of the limits of one rendering.

    Args:
        conversation: All that is rendered. Its size, in characters and `ENTRY` for each value, raises the limits. It is
            looked at once the limits of an empty one are reached, which few renderings do.
    """

    def __init__(self, conversation: Any) -> None:
        self._conversation = conversation
        self._is_extended = False
        self._characters, self._operations, self._seconds = CHARACTERS, OPERATIONS, SECONDS
        self._until_look = _LOOK
        self._start, self._own_start = time.monotonic(), 0.0

    # What the compiled template calls under these names (template_compiler.py).

    def tick(self, operations: int = 1) -> None:
        """Counts operations."""
        self._until_look -= operations
        if self._until_look < 0:
            self._look()

    def made(self, value: Any) -> Any:
        """The value that an operation has made, counted."""
        if type(value) is str:
            if len(value) >= _SHORT:
                self.charge(len(value))
            return value
        return value if type(value) in _SCALARS and type(value) is not int else self._made(value)

    def text(self, value: Any) -> str:
        """The text of a value; markup stays what it is."""
        if type(value) is str:
            return value
        return value if isinstance(value, str) else str(self.checked(value))

    def checked(self, value: Any) -> Any:
        """A value that may be written, or compared, whole."""
        kind = type(value)
        if kind is str:
            if len(value) >= _LONG:
                self.tick(len(value) // _LONG)
        elif kind not in _SCALARS:
            self.size(value)
        return value

    def within(self, value: Any) -> Any:
        """A value in which another may be sought."""
        if isinstance(value, range):
            self.tick(len(value) // 16)
        return value if type(value) is dict else self.checked(value)

    def concat(self, texts: Iterable[str]) -> str:
        """Joins texts."""
        texts = texts if isinstance(texts, list) else list(texts)
        size = sum(map(len, texts))
        if size >= _SHORT:
            self.charge(size)
        return "".join(texts)

    def str_join(self, values: Sequence[Any]) -> str:
        """Joins the texts of values."""
        return self.concat([str(self.text(value)) for value in values])

    def markup_join(self, values: Sequence[Any]) -> str:
        """Joins the texts of values, of which one may be markup: others are then escaped."""
        self.afford(6 * sum(map(len, map(self.text, values))))
        joined: str = self.made(markup_join(values))
        return joined

    # What filters and calls need besides.

    def charge(self, characters: int) -> None:
        """Counts characters that were made, or soon will be.

        Raises:
            TemplateLimitError: these are more than are left.
        """
        self._characters -= characters
        if self._characters < 0:
            self._extend()
            if self._characters < 0:
                raise TemplateLimitError("it makes too much text")
        if characters > 1 << 16:
            self._look()

    def afford(self, characters: int) -> None:
        """Refuses characters that cannot be made. Raises as `charge`."""
        if characters > self._characters:
            self._extend()
            if characters > self._characters:
                raise TemplateLimitError("it makes too much text")

    def size(self, value: Any) -> int:
        """The characters and entries of all that is in a value, shared parts as often as they are there.

        Raises:
            TemplateLimitError: these are more than may be made, or they are too deep.
        """
        total, level = 0, [value]
        for _ in range(_DEPTH):
            total += ENTRY * len(level)
            below: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is str:
                    total += len(each)
                elif kind not in _SCALARS:
                    if kind is list:
                        below += each
                    else:
                        total += self._spread(each, below)
                    if total + ENTRY * len(below) > self._characters:
                        self.afford(total + ENTRY * len(below))
            if not below:
                self.afford(total)
                self.tick(total // 128)
                return total
            level = below
        raise TemplateLimitError("it makes values that are too deep")

    def listed(self, values: Any) -> list[Any]:
        """The values of an iterable as a list that may be written, or compared, whole."""
        result = list(self.within(values) if isinstance(values, str) else values)
        self.size(result)
        self.charge(ENTRY * len(result))
        return result

    def check_tuple(self, value: Any) -> None:
        """Refuses a tuple that holds others too deep, or too many."""
        total, level = 0, [value]
        for _ in range(_TUPLE_DEPTH):
            level = [each for entry in level if isinstance(entry, tuple) for each in entry]
            total += len(level)
            if total > _TUPLE_ENTRIES:
                break
            if not level:
                return
        raise TemplateLimitError("it makes tuples that are too large")

    def _made(self, value: Any) -> Any:
        if isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise TemplateLimitError("it makes numbers that are too large")
        elif isinstance(value, str | bytes):
            self.charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self.charge(ENTRY * len(value))
            if isinstance(value, tuple):
                self.check_tuple(value)
            elif isinstance(value, dict):
                for each in value.values():
                    if isinstance(each, tuple):
                        self.check_tuple(each)
        return value

    @staticmethod
    def _spread(value: Any, below: list[Any]) -> int:
        """Puts the entries of a value in a list, and returns the characters that it has besides."""
        if isinstance(value, dict):
            below += value.values()
            try:
                return len("".join(value))
            except TypeError:  # a key is no text
                below += value
        elif isinstance(value, _SEQUENCES):
            below += value
        elif isinstance(value, Namespace):
            below.append(value._Namespace__attrs)
        elif isinstance(value, str | bytes):
            return len(value)
        return 0

    def _look(self) -> None:
        self._operations -= _LOOK - self._until_look
        self._until_look = _LOOK
        if self._operations < 0:
            self._extend()
            if self._operations < 0:
                raise TemplateLimitError("it takes too many operations")
        if time.monotonic() - self._start > self._seconds:
            self._extend()
            own = time.thread_time()
            self._own_start = self._own_start or own
            if own - self._own_start > self._seconds:
                raise TemplateLimitError("it takes too long")

    def _extend(self) -> None:
        """Raises the limits by what the conversation's size allows, once."""
        if self._is_extended:
            return
        self._is_extended = True
        counter = Budget(None)
        counter._is_extended, counter._characters = True, 1 << 40
        counter._until_look = 1 << 60
        size = counter.size(self._conversation)
        self._operations += OPERATIONS_OF_SIZE * size
        self._characters += CHARACTERS_OF_SIZE * size
        self._seconds += SECONDS_OF_SIZE * size


class Lazy:
    """An iterator of a filter, whose values are made, and counted, as they are asked for."""

    def __init__(self, budget: Budget, values: Iterable[Any], source: Any) -> None:
        self._tick: Callable[[], None] = budget.tick
        self._values = iter(values)
        self.depth: int = source.depth + 1 if isinstance(source, Lazy) else 1
        if self.depth > _TUPLE_DEPTH:
            raise TemplateLimitError("it applies too many filters to a value")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._tick()
        return next(self._values)
