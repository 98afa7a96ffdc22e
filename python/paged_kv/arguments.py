"""Checks of plain arguments that several rooms share."""

from __future__ import annotations

import operator
from typing import Any

from paged_kv.errors import ContractError, ContractTypeError


def integer(name: str, value: Any, minimum: int) -> int:
    """`value` as an int of at least `minimum`: integers of NumPy and 0-d tensors too, no bools or floats.

    Raises:
        ContractTypeError: `value`, called `name` in the message, is not an integer.
        ContractError: it is below `minimum`.
    """
    try:
        # operator.index would read True as 1, which is never what a caller means by a count.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ContractTypeError(f"{name} must be an integer, not {value!r} of type {type(value).__name__}")
    if number < minimum:
        raise ContractError(f"{name} must be at least {minimum}, not {number}")
    return number
