"""Merging attention states: the names, argument order and meaning of FlashInfer's `cascade` module.

A state is what attention over one set of keys gives: the output `v` and the base-2 logarithm `s` of the softmax's
denominator, float32. States over disjoint sets of keys merge into the state over their union. A state with
`s = -inf` has seen no key: its `v` is ignored, whatever it holds, NaN included.

Any array on the CPU comes in, and torch and MAX arrays on one GPU; results have the kind of the first argument and lie
beside it. Sums are float32.
Letters in shapes: S rows (tokens), n states, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_alike
from paged_kv.arrays.dtypes import max_dtype
from paged_kv.arrays.types import ArrayDevice, ArrayT, SupportsDLPack
from paged_kv.calls.plan import check_q_dtype
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

State = tuple[Any, Any]
"""Views of v and s."""


def merge_state(v_a: ArrayT, s_a: SupportsDLPack, v_b: SupportsDLPack, s_b: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges two states, as FlashInfer's `merge_state`.

    Args:
        v_a, v_b: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s_a, s_b: `[S, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v_a` and s `[S, H]` float32; 0 and -inf where both sides are empty.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
    """
    device = devices.device_of(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    a = _state(device, v_a, s_a, ("v_a", "s_a"), rank=3)
    b = _state(device, v_b, s_b, ("v_b", "s_b"), rank=3)
    check_alike(b[0], a[0], "v_b", "v_a's")
    v, s = _merge_two(device, a, b)
    return device.like(v_a, v), device.like(v_a, s)


def merge_state_in_place(
    v: SupportsDLPack,
    s: SupportsDLPack,
    v_other: SupportsDLPack,
    s_other: SupportsDLPack,
    mask: SupportsDLPack | None = None,
) -> None:
    """Merges a second state into `(v, s)`, in place, as FlashInfer's `merge_state_in_place`.

    Args:
        v, v_other: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s, s_other: `[S, H]` float32, base 2.
        mask: `[S]` bool: only rows where it is true are merged, the others keep their bits; None merges all.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
        ContractError: `v` or `s` cannot be written.
    """
    device = devices.device_of(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    ours = _state(device, v, s, ("v", "s"), rank=3)
    other = _state(device, v_other, s_other, ("v_other", "s_other"), rank=3)
    check_alike(other[0], ours[0], "v_other", "v's")
    rows = None if mask is None else _mask(device, mask, len(ours[0]))
    for name, view in zip(("v", "s"), ours, strict=True):
        if not device.is_writable(view):
            raise ContractError(f"{name} is read-only, and is to be changed in place")
    for view, merged in zip(ours, _merge_two(device, ours, other), strict=True):
        chosen = merged
        if rows is not None:
            chosen = device.select(rows.reshape(-1, *[1] * (view.ndim - 1)), merged, view)
        device.write(view, chosen)


def merge_states(v: ArrayT, s: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges `n` states at once, as FlashInfer's `merge_states`.

    Args:
        v: `[S, n, H, D]` float32, float16 or bfloat16. The states are the second dimension.
        s: `[S, n, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v` and s `[S, H]` float32; 0 and -inf where all states are empty, or n = 0.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
    """
    device = devices.device_of(v=v, s=s)
    merged_v, merged_s = _merge(device, *_state(device, v, s, ("v", "s"), rank=4))
    return device.like(v, merged_v), device.like(v, merged_s)


def _merge(device: ArrayDevice, v: Any, s: Any) -> State:
    """The states `v [S, n, H, D]` and `s [S, n, H]` merged along n; on a GPU enqueued, not waited for."""
    rows, _, heads, head_dim = v.shape
    dtype = device.dtype(v)
    if 0 in s.shape:  # no rows, no states or no heads
        return device.full((rows, heads, head_dim), 0, dtype), device.full((rows, heads), -np.inf, np.float32)
    if not head_dim:  # the lse alone
        _, lse = _merge(device, device.full((*v.shape[:-1], 1), 0, dtype), s)
        return device.full((rows, heads, 0), 0, dtype), lse
    v, s = device.contiguous(v), device.contiguous(s)
    variant = Variant("merge", max_dtype(dtype), max_dtype(dtype))
    with device.ordered():
        merged_v, merged_s = runtime_on(device.index).execute(variant, device.buffer(v), device.buffer(s))
    return device.take(merged_v), device.take(merged_s)


def _merge_two(device: ArrayDevice, a: State, b: State) -> State:
    v, s = (device.stack(pair, 1) for pair in zip(a, b, strict=True))
    return _merge(device, v, s)


def _mask(device: ArrayDevice, mask: Any, num_rows: int) -> Any:
    """Which rows are merged, a view `[S]` of bool."""
    rows = device.view(mask, "mask")
    dtype = device.dtype(rows)
    if dtype != np.bool_:
        raise ContractTypeError(f"mask: dtype {dtype.name}, expected bool")
    if tuple(rows.shape) != (num_rows,):
        raise ShapeError(f"mask: shape {list(rows.shape)}, expected {[num_rows]}, one entry a row of v")
    return rows


def _state(device: ArrayDevice, v: Any, s: Any, names: tuple[str, str], rank: int) -> State:
    """Views of a state's two arrays, checked on their own and against each other."""
    outputs, sums = device.view(v, names[0]), device.view(s, names[1])
    check_q_dtype(f"{names[0]}: dtype", device.dtype(outputs))
    if device.dtype(sums) != np.float32:
        raise ContractTypeError(f"{names[1]}: dtype {device.dtype(sums).name}, expected float32")
    if outputs.ndim != rank:
        expected = "[S, H, D]" if rank == 3 else "[S, n, H, D]"
        raise ShapeError(f"{names[0]}: shape {list(outputs.shape)}, expected {expected}")
    if sums.shape != outputs.shape[:-1]:
        raise ShapeError(
            f"{names[1]}: shape {list(sums.shape)}, expected {list(outputs.shape[:-1])}, {names[0]}'s without the last"
        )
    return outputs, sums
