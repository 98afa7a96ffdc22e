"""Merging attention states: the names, argument order and meaning of FlashInfer's `cascade` module.

A state is what attention over one set of keys gives: the output `v` and the base-2 logarithm `s` of the softmax's
denominator, float32. States over disjoint sets of keys merge into the state over their union. A state with
`s = -inf` has seen no key: its `v` is ignored, whatever it holds, NaN included.

Any array comes in (see `paged_kv.arrays`); results have the kind of the first argument. Sums are float32.
Letters in shapes: S rows (tokens), n states, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from paged_kv.arrays import as_numpy, like
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

Array = npt.NDArray[Any]

_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


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
    a, b = _state(v_a, s_a, ("v_a", "s_a"), rank=3), _state(v_b, s_b, ("v_b", "s_b"), rank=3)
    _check_alike(a, b, ("v_a", "v_b"))
    v, s = _merge(*(np.stack(pair, axis=1) for pair in zip(a, b, strict=True)))
    return like(v_a, v), like(v_a, s)


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
    ours = _state(v, s, ("v", "s"), rank=3)
    other = _state(v_other, s_other, ("v_other", "s_other"), rank=3)
    _check_alike(ours, other, ("v", "v_other"))
    for name, array in zip(("v", "s"), ours, strict=True):
        if not array.flags.writeable:
            raise ContractError(f"{name} is read-only, and is to be changed in place")
    rows = np.ones(len(ours[0]), np.bool_)
    if mask is not None:
        rows = as_numpy(mask, "mask")
        if rows.dtype != np.bool_:
            raise ContractTypeError(f"mask: dtype {rows.dtype.name}, expected bool")
        if rows.shape != ours[0].shape[:1]:
            raise ShapeError(f"mask: shape {list(rows.shape)}, expected {[len(ours[0])]}, one entry a row of v")
    merged = _merge(*(np.stack((a[rows], b[rows]), axis=1) for a, b in zip(ours, other, strict=True)))
    for array, result in zip(ours, merged, strict=True):
        array[rows] = result


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
    merged_v, merged_s = _merge(*_state(v, s, ("v", "s"), rank=4))
    return like(v, merged_v), like(v, merged_s)


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


def _state(v: Any, s: Any, names: tuple[str, str], rank: int) -> tuple[Array, Array]:
    """Views of a state's two arrays, checked on their own and against each other."""
    outputs, sums = as_numpy(v, names[0]), as_numpy(s, names[1])
    if outputs.dtype not in _DTYPES:
        allowed = ", ".join(dtype.name for dtype in _DTYPES)
        raise ContractTypeError(f"{names[0]}: dtype {outputs.dtype.name} is none of {allowed}")
    if sums.dtype != np.float32:
        raise ContractTypeError(f"{names[1]}: dtype {sums.dtype.name}, expected float32")
    if outputs.ndim != rank:
        expected = "[S, H, D]" if rank == 3 else "[S, n, H, D]"
        raise ShapeError(f"{names[0]}: shape {list(outputs.shape)}, expected {expected}")
    if sums.shape != outputs.shape[:-1]:
        raise ShapeError(
            f"{names[1]}: shape {list(sums.shape)}, expected {list(outputs.shape[:-1])}, {names[0]}'s without the last"
        )
    return outputs, sums


def _check_alike(a: tuple[Array, Array], b: tuple[Array, Array], names: tuple[str, str]) -> None:
    """Two states have one shape and one dtype."""
    if a[0].shape != b[0].shape:
        raise ShapeError(f"{names[1]}: shape {list(b[0].shape)} differs from {names[0]}'s {list(a[0].shape)}")
    if a[0].dtype != b[0].dtype:
        raise ContractTypeError(f"{names[1]}: dtype {b[0].dtype.name} differs from {names[0]}'s {a[0].dtype.name}")
