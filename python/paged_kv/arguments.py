"""Checks of plain arguments that several modules share, and how messages show a value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from paged_kv.errors import ContractError, ContractTypeError

LARGEST_INDEX = 2**31 - 1
"""The largest int32: page ids, positions, lengths and sizes are at most this."""

_MOST_BITS = 256
_MOST_CHARACTERS = 120
_MOST_ENTRIES = 8


def shown(value: Any) -> str:
    """A value for a message: `repr(value)` in one line of at most 120 characters, or its type.

    Python refuses to print integers of thousands of digits, an object's own `__repr__` may raise, and that of a torch
    tensor whose storage was freed ends the process: arrays are named by their types alone.
    """
    try:
        text = " ".join(_text(value, depth=2).split())
    except Exception:
        text = _type_of(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _text(value: Any, depth: int) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    if type(value) in (list, tuple):
        if depth == 0 or len(value) > _MOST_ENTRIES:
            return f"a {type(value).__name__} of {len(value)}"
        entries = ", ".join(_text(entry, depth - 1) for entry in value)
        return f"[{entries}]" if type(value) is list else f"({entries}{',' * (len(value) == 1)})"
    if isinstance(value, dict | set | frozenset) or (not isinstance(value, type) and hasattr(value, "__dlpack__")):
        return _type_of(value)
    return repr(value)


def _type_of(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """`value` as an int from `minimum` to `maximum`: integers of NumPy and 0-d tensors too, no bools or floats.

    Raises:
        ContractTypeError: `value`, called `name` in the message, is not an integer.
        ContractError: it is below `minimum` or above `maximum`.
    """
    try:
        # operator.index would read True as 1, which is never what a caller means by a count.
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # an `__index__` may raise anything
        number = None
    if number is None:
        raise ContractTypeError(f"{name}: expected an integer, got {shown(value)} of type {type(value).__name__}")
    if number < minimum:
        raise ContractError(f"{name}: expected at least {minimum}, got {shown(number)}")
    if maximum is not None and number > maximum:
        raise ContractError(f"{name}: expected at most {maximum}, got {shown(number)}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return whether `value` is true, as `if value` sees it.

    Raises:
        ContractTypeError: it has no truth value (an array of several elements); the message calls it `name`.
    """
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except Exception as error:  # a `__bool__` may raise anything
        raise ContractTypeError(f"{name}: expected true or false, got {shown(value)}") from error


def one_of(name: str, value: Any, legal: Sequence[Any]) -> None:
    """Refuses a value that is none of `legal`, or of another type.

    Raises:
        ContractError: as said; the message calls it `name`.
    """
    if not any(isinstance(value, type(each)) and value == each for each in legal):
        raise ContractError(f"{name}: expected {' or '.join(map(repr, legal))}, got {shown(value)}")


def printable(text: object) -> str:
    """`str(text)` for a message, unquoted: one line of at most 120 characters, what a terminal may act on escaped."""
    shortened = str(text)
    if len(shortened) > _MOST_CHARACTERS:
        shortened = shortened[: _MOST_CHARACTERS - 3] + "..."
    return shortened if shortened.isprintable() else ascii(shortened)
