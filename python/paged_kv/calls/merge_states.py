"""Merging attention states on the device that they lie on: what `paged_kv.cascade` documents.

Letters in shapes: S rows (tokens), n states, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays.dtypes import max_dtype
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.plan import check_dtype
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

_MOST_HEAD_DIM = 1 << 16

State = tuple[Any, Any]
"""Views of the output v and its base-2 lse s."""


def merge(device: ArrayDevice, v: Any, s: Any) -> State:
    """The states `v [S, n, H, D]` and `s [S, n, H]` merged along n; on a GPU enqueued, not waited for."""
    rows, _, heads, head_dim = v.shape
    dtype = device.dtype(v)
    if 0 in s.shape:  # no rows, no states or no heads
        return device.full((rows, heads, head_dim), 0, dtype), device.full((rows, heads), -np.inf, np.float32)
    if not head_dim:  # the lse alone
        _, lse = merge(device, device.full((*v.shape[:-1], 1), 0, dtype), s)
        return device.full((rows, heads, 0), 0, dtype), lse
    v, s = device.contiguous(v), device.contiguous(s)
    variant = Variant("merge", max_dtype(dtype), max_dtype(dtype))
    with device.ordered():
        merged_v, merged_s = runtime_on(device.index).execute(variant, device.buffer(v), device.buffer(s))
    return device.take(merged_v), device.take(merged_s)


def merge_two(device: ArrayDevice, a: State, b: State) -> State:
    """Two states of `[S, H, D]` and `[S, H]`, merged."""
    v, s = (device.stack(pair, 1) for pair in zip(a, b, strict=True))
    return merge(device, v, s)


def checked_state(device: ArrayDevice, v: Any, s: Any, names: tuple[str, str], rank: int) -> State:
    """Views of a state's two arrays, checked on their own and against each other; messages call them `names`.

    Raises:
        ContractTypeError: a dtype is not one of a state.
        ShapeError: v is not of `rank` or its head_dim is over 2^16 (an expanded axis, which would be copied), or s has
            not its shape without the last dimension.
    """
    outputs, sums = device.view(v, names[0]), device.view(s, names[1])
    check_dtype(f"{names[0]}: dtype", device.dtype(outputs))
    if device.dtype(sums) != np.float32:
        raise ContractTypeError(f"{names[1]}: expected dtype float32, got {device.dtype(sums).name}")
    if outputs.ndim != rank:
        expected = "[S, H, D]" if rank == 3 else "[S, n, H, D]"
        raise ShapeError(f"{names[0]}: expected {expected}, got shape {list(outputs.shape)}")
    if outputs.shape[-1] > _MOST_HEAD_DIM:
        raise ShapeError(f"{names[0]}: expected a head_dim of at most {_MOST_HEAD_DIM}, got {outputs.shape[-1]}")
    if sums.shape != outputs.shape[:-1]:
        raise ShapeError(
            f"{names[1]}: shape {list(sums.shape)}, expected {list(outputs.shape[:-1])}, {names[0]}'s without the last"
        )
    return outputs, sums


def checked_mask(device: ArrayDevice, mask: Any, num_rows: int) -> Any:
    """Return which rows are merged, a view `[S]` of bool.

    Raises:
        ContractTypeError, ShapeError: it is not bool, or not of `num_rows` entries.
    """
    rows = device.view(mask, "mask")
    dtype = device.dtype(rows)
    if dtype != np.bool_:
        raise ContractTypeError(f"mask: expected dtype bool, got {dtype.name}")
    if tuple(rows.shape) != (num_rows,):
        raise ShapeError(f"mask: expected shape {[num_rows]}, one entry a row of v, got {list(rows.shape)}")
    return rows
