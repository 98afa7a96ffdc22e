"""Merging attention states: the names, argument order and meaning of FlashInfer's `cascade` module.

A state is what attention over one set of keys gives: the output `v` and the base-2 logarithm `s` of the softmax's
denominator, float32. States over disjoint sets of keys merge into the state over their union. A state with
`s = -inf` has seen no key: its `v` is ignored, whatever it holds, NaN included.

Any array on the CPU comes in (see `paged_kv.arrays.host`), and torch and MAX arrays on one GPU, where a kernel of this
package merges them; results have the kind of the first argument and lie beside it. Sums are float32.
Letters in shapes: S rows (tokens), n states, H heads, D head dimension.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import as_numpy, like
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.runtime.variants import Variant

Array = npt.NDArray[Any]

State = tuple[Any, Any]
"""v and s: NumPy arrays, or torch tensors on a GPU."""

_MAX_DTYPES = {
    np.dtype(np.float32): DType.float32,
    np.dtype(np.float16): DType.float16,
    np.dtype(ml_dtypes.bfloat16): DType.bfloat16,
}


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
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
    place = places.place_of(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    a = _state(place, v_a, s_a, ("v_a", "s_a"), rank=3)
    b = _state(place, v_b, s_b, ("v_b", "s_b"), rank=3)
    _check_alike(a, b, ("v_a", "v_b"))
    return _finish(place, v_a, *_merge_two(place, a, b))


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
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
    place = places.place_of(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    ours = _state(place, v, s, ("v", "s"), rank=3)
    other = _state(place, v_other, s_other, ("v_other", "s_other"), rank=3)
    _check_alike(ours, other, ("v", "v_other"))
    rows = None if mask is None else _mask(place, mask, len(ours[0]))
    if place is not None:
        merged = _merge_two(place, ours, other)
        for tensor, result in zip(ours, merged, strict=True):
            kept = result if rows is None else _choose(rows, result, tensor)
            tensor.copy_(kept)
        place.after_torch()
        return
    for name, array in zip(("v", "s"), ours, strict=True):
        if not array.flags.writeable:
            raise ContractError(f"{name} is read-only, and is to be changed in place")
    chosen = np.ones(len(ours[0]), np.bool_) if rows is None else rows
    merged = _merge_two(None, *((state[0][chosen], state[1][chosen]) for state in (ours, other)))
    for array, result in zip(ours, merged, strict=True):
        array[chosen] = result


def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
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
    place = places.place_of(v=v, s=s)
    states = _state(place, v, s, ("v", "s"), rank=4)
    return _finish(place, v, *(_merge(*states) if place is None else _merge_on(place, *states)))


def _merge(v: Array, s: Array) -> tuple[Array, Array]:
    """The states `v [S, n, H, D]` and `s [S, n, H]` merged along n."""
    greatest = s.max(axis=1, initial=-np.inf)  # [S, H]
    base = np.where(np.isneginf(greatest), np.float32(0), greatest)  # -inf - -inf would be NaN
    weights = np.exp2(s - base[:, None])  # [S, n, H]
    total = weights.sum(axis=1)
    empty = total == 0
    total[empty] = 1
    seen = np.where((weights == 0)[..., None], np.float32(0), v.astype(np.float32))  # 0 * NaN would be NaN
    merged = np.einsum("snh,snhd->shd", weights / total[:, None], seen)
    lse = np.where(empty, np.float32(-np.inf), base + np.log2(total))
    return merged.astype(v.dtype), lse


def _merge_on(place: places.Place, v: Any, s: Any) -> tuple[Any, Any]:
    """`_merge` on a GPU, over torch tensors there: enqueued, in the order of torch's current stream."""
    torch = import_module("torch")
    if not s.numel() or not v.shape[-1]:  # no rows, no states, or nothing in one: only the lse may be needed
        wide = v.new_zeros((*v.shape[:-1], 1))
        lse = _merge_on(place, wide, s)[1] if s.numel() else s.new_full((len(v), v.shape[2]), -torch.inf)
        return v.new_zeros((len(v), *v.shape[2:])), lse
    dtype = _MAX_DTYPES[gpu.numpy_dtype(v, "v")]
    v, s = v.contiguous(), s.contiguous()
    with place.ordered():
        merged = place.runtime.execute(Variant("merge", dtype, dtype), gpu.tensor_buffer(v), gpu.tensor_buffer(s))
    merged_v, merged_s = (torch.from_dlpack(result) for result in merged)
    return merged_v, merged_s


def _merge_two(place: places.Place | None, a: State, b: State) -> tuple[Any, Any]:
    if place is None:
        return _merge(*(np.stack(pair, axis=1) for pair in zip(a, b, strict=True)))
    return _merge_on(place, *(import_module("torch").stack(pair, 1) for pair in zip(a, b, strict=True)))


def _finish(place: places.Place | None, sample: Any, v: Any, s: Any) -> tuple[Any, Any]:
    """Results as arrays of the kind of `sample`."""
    if place is None:
        return like(sample, v), like(sample, s)
    return gpu.like_of(place, sample, v), gpu.like_of(place, sample, s)


def _choose(rows: Any, merged: Any, kept: Any) -> Any:
    """On a GPU: the merged values of the rows that are true, and the others' own bits."""
    return import_module("torch").where(rows.view(-1, *[1] * (kept.ndim - 1)), merged, kept)


def _mask(place: places.Place | None, mask: Any, num_rows: int) -> Any:
    """Which rows are merged, `[S]` bool."""
    rows: Any = as_numpy(mask, "mask") if place is None else gpu.to_tensor(mask, "mask")
    dtype = rows.dtype if place is None else gpu.numpy_dtype(rows, "mask")
    if dtype != np.bool_:
        raise ContractTypeError(f"mask: dtype {dtype.name}, expected bool")
    if tuple(rows.shape) != (num_rows,):
        raise ShapeError(f"mask: shape {list(rows.shape)}, expected {[num_rows]}, one entry a row of v")
    return rows


def _state(place: places.Place | None, v: Any, s: Any, names: tuple[str, str], rank: int) -> State:
    """Views of a state's two arrays, on a GPU tensors, checked on their own and against each other."""
    if place is None:
        arrays: State = (as_numpy(v, names[0]), as_numpy(s, names[1]))
    else:
        arrays = (gpu.to_tensor(v, names[0]), gpu.to_tensor(s, names[1]))
    outputs, sums = (
        gpu.Facts(a.shape, a.dtype) if place is None else gpu.Facts.of(a, n) for a, n in zip(arrays, names, strict=True)
    )
    if outputs.dtype not in _MAX_DTYPES:
        allowed = ", ".join(dtype.name for dtype in _MAX_DTYPES)
        raise ContractTypeError(f"{names[0]}: dtype {outputs.dtype.name} is none of {allowed}")
    if sums.dtype != np.float32:
        raise ContractTypeError(f"{names[1]}: dtype {sums.dtype.name}, expected float32")
    if len(outputs.shape) != rank:
        expected = "[S, H, D]" if rank == 3 else "[S, n, H, D]"
        raise ShapeError(f"{names[0]}: shape {list(outputs.shape)}, expected {expected}")
    if sums.shape != outputs.shape[:-1]:
        raise ShapeError(
            f"{names[1]}: shape {list(sums.shape)}, expected {list(outputs.shape[:-1])}, {names[0]}'s without the last"
        )
    return arrays


def _check_alike(a: State, b: State, names: tuple[str, str]) -> None:
    """Two states have one shape and one dtype."""
    if a[0].shape != b[0].shape:
        raise ShapeError(f"{names[1]}: shape {list(b[0].shape)} differs from {names[0]}'s {list(a[0].shape)}")
    if a[0].dtype != b[0].dtype:
        found, expected = (str(state[0].dtype).removeprefix("torch.") for state in (b, a))
        raise ContractTypeError(f"{names[1]}: dtype {found} differs from {names[0]}'s {expected}")
