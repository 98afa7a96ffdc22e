"""Numbers that FlashInfer takes as arrays of one element too."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import is_float
from paged_kv.arrays.host import as_numpy
from paged_kv.errors import ContractError
from paged_kv.options import check_number


def is_array(value: Any) -> bool:
    """Return whether a value is an array, not a number."""
    if isinstance(value, np.ndarray | type):
        return not isinstance(value, type)
    try:
        return hasattr(value, "__dlpack__")
    except Exception:  # a `__getattr__` may raise anything
        return False


def one_number(value: Any, name: str) -> Any:
    """The number in a float array of one element; any other value as it is, for others to check.

    Raises:
        ContractTypeError: it is an array on a GPU, which would have to be waited for.
    """
    if not is_array(value):
        return value
    devices.require_host(value, name, "it is read on the host")
    view = as_numpy(value, name)
    return float(view.reshape(())) if view.size == 1 and is_float(view.dtype) else value


def checked_number(value: Any, name: str) -> float:
    """A number that float32 has, or the one in an array of one element.

    Raises:
        ContractTypeError, ContractError: it is none; the message calls it `name`.
    """
    number = one_number(value, name)
    check_number(name, number)
    return float(number)


def one_scale(value: Any, name: str, num_heads: int, factor: Any = None, factor_name: str = "") -> Any:
    """The scale of q, k or v that a call gives in two arguments: their product, or None where neither is given.

    Args:
        value: A number, an array of one element, or `[num_heads]` of one number for all heads; or None.
        name: What messages call it.
        num_heads: The number of heads of q, or of k and v.
        factor: A number or an array of one element; or None.
        factor_name: What messages call that.

    Raises:
        ContractTypeError: an argument is no number, or lies on a GPU.
        ContractError: an array has other numbers for other heads; float32 has not such a number.
    """
    scale = one_number(value, name)
    if is_array(scale):
        view = as_numpy(scale, name)
        if view.shape != (num_heads,) or not is_float(view.dtype) or (view != view[:1]).any():
            raise ContractError(f"{name}: expected one number for all heads, got an array of shape {list(view.shape)}")
        scale = float(view[0])
    other = one_number(factor, factor_name)
    for number, what in ((scale, name), (other, factor_name)):
        if number is not None:
            check_number(what, number)
    if scale is None or other is None:
        return other if scale is None else scale
    check_number(f"{name} * {factor_name}", product := float(scale) * float(other))
    return product
