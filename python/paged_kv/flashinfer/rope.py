"""Rotary position embedding: FlashInfer's `rope` module on arrays of the host.

Letters in shapes: N rows of B requests, Hq and Hk heads of q and k, D their dimension, P positions of a table. q and k
are float32, float16 or bfloat16, of any strides; results have the kind and dtype of each. Angles are float64 (float32
where a table gives them); products and sums are float32, and are rounded once. A table, `cos_sin_cache`, is
`[P, rotary_dim]` float32: at each position the cosines of all pairs, then their sines.

Each `..._inplace` takes the arguments of the function that it is named after, writes the results to q and k, and
returns nothing; a read-only array is a `ContractError`, as are arrays that share memory.

Raises: `ContractTypeError`, `ShapeError`, `PageTableError` or `ContractError`, for what is no array on the host of such
a dtype and shape, indices that are none, or a number that is out of range. Nothing is written then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import LARGEST_INDEX, flag, integer, shown
from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.host_arrays import Floats, Written, checked, floats, write_all
from paged_kv.calls.offsets import check_count, check_offsets
from paged_kv.calls.scalars import checked_number
from paged_kv.errors import ContractError, ShapeError

__all__ = [
    "Llama31Rotation",
    "Rotation",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]

P = ParamSpec("P")
Turns = tuple[Floats, Floats]
"""Cosines and sines, `[N, rotary_dim / 2]`."""


@dataclass(frozen=True)
class Rotation:
    """The last arguments of `apply_rope` and `apply_rope_pos_ids`: how far each pair of dimensions turns."""

    rotary_dim: int | None = None
    """So many of a head's first dimensions are rotated, the others copied: an even number; None: all."""
    interleave: bool = False
    """True: pair i are dimensions 2 i and 2 i + 1; False: i and `rotary_dim / 2 + i`."""
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    """Pair i turns by `rope_theta ** (-2 i / rotary_dim) / rope_scale` radians a position."""

    def __post_init__(self) -> None:
        flag("interleave", self.interleave)
        for name, value in vars(self).items():
            if name not in ("rotary_dim", "interleave") and checked_number(value, name) <= 0:
                raise ContractError(f"{name}: expected a positive number, got {shown(value)}")

    def turns(self, positions: npt.NDArray[Any], head_dim: int) -> Turns:
        """The turns of rows at positions `[N]`."""
        dim = head_dim if self.rotary_dim is None else integer("rotary_dim", self.rotary_dim, 0, LARGEST_INDEX)
        if dim % 2 or dim > head_dim:
            raise ShapeError(f"rotary_dim: expected an even number up to q's head_dim {head_dim}, got {dim}")
        with np.errstate(over="ignore", invalid="ignore"):  # frequencies past the largest number turn to NaN
            frequencies = float(self.rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / max(dim, 1))
            angles = positions.astype(np.float64)[:, None] * self.stretched(frequencies)
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def stretched(self, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Frequencies with `rope_scale`."""
        return frequencies / float(self.rope_scale)


@dataclass(frozen=True)
class Llama31Rotation(Rotation):
    """The last arguments of `apply_llama31_rope` and `apply_llama31_rope_pos_ids`.

    `rope_scale` counts wholly for pairs that turn less than `low_freq_factor` times in `old_context_len` positions, not
    at all for those that turn more than `high_freq_factor` times, and for a share of it between.
    """

    rope_scale: float = 8.0
    rope_theta: float = 5e5
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_context_len: int = 8192

    def stretched(self, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        low, span = float(self.low_freq_factor), float(self.high_freq_factor) - float(self.low_freq_factor)
        if span <= 0:
            raise ContractError(f"high_freq_factor: expected above low_freq_factor {low}, got {self.high_freq_factor}")
        share = np.clip((self.old_context_len * frequencies / (2 * math.pi) - low) / span, 0, 1)
        return (1 - share) * frequencies / float(self.rope_scale) + share * frequencies


def apply_rope(
    q: ArrayT, k: SupportsDLPack, indptr: SupportsDLPack, offsets: SupportsDLPack, *args: Any, **options: Any
) -> tuple[ArrayT, Any]:
    """Rotates q `[N, Hq, D]` and k `[N, Hk, D]`: row `indptr[b] + i` stands at position `offsets[b] + i`.

    Args:
        indptr: `[B + 1]`, from 0 to N.
        offsets: `[B]`: the position of each request's first row.
        args, options: Those of `Rotation`, in its order.
    """
    return _rotated(q, k, _positions(q, indptr, offsets), Rotation(*args, **options))


def apply_rope_pos_ids(
    q: ArrayT, k: SupportsDLPack, pos_ids: SupportsDLPack, *args: Any, **options: Any
) -> tuple[ArrayT, Any]:
    """`apply_rope` of rows at positions `pos_ids` `[N]`."""
    return _rotated(q, k, host_indices(pos_ids, "pos_ids"), Rotation(*args, **options))


def apply_llama31_rope(
    q: ArrayT, k: SupportsDLPack, indptr: SupportsDLPack, offsets: SupportsDLPack, *args: Any, **options: Any
) -> tuple[ArrayT, Any]:
    """`apply_rope` with the frequencies of Llama 3.1: `args` and `options` are those of `Llama31Rotation`."""
    return _rotated(q, k, _positions(q, indptr, offsets), Llama31Rotation(*args, **options))


def apply_llama31_rope_pos_ids(
    q: ArrayT, k: SupportsDLPack, pos_ids: SupportsDLPack, *args: Any, **options: Any
) -> tuple[ArrayT, Any]:
    """`apply_rope_pos_ids` with the frequencies of Llama 3.1: `args` and `options` are those of `Llama31Rotation`."""
    return _rotated(q, k, host_indices(pos_ids, "pos_ids"), Llama31Rotation(*args, **options))


def apply_rope_with_cos_sin_cache(
    positions: SupportsDLPack,
    query: ArrayT,
    key: SupportsDLPack,
    head_size: int,
    cos_sin_cache: SupportsDLPack,
    is_neox: bool = True,
) -> tuple[ArrayT, Any]:
    """Rotates `query` `[N, Hq * head_size]` and `key` `[N, Hk * head_size]`, or `[N, H, head_size]`, by a table.

    Args:
        positions: `[N]`, from 0 to P - 1.
        head_size: D, at least `rotary_dim`.
    """
    size = integer("head_size", head_size, 1, LARGEST_INDEX)
    turns = turns_of_table(cos_sin_cache, positions, "positions")
    return tuple(
        _like(array, turned(_heads(name, array, size), name, turns, not flag("is_neox", is_neox)))
        for name, array in (("query", query), ("key", key))
    )


def _in_place(rotated: Callable[P, tuple[Any, Any]]) -> Callable[P, None]:
    """The function whose results are written to q and k."""
    parameters = signature(rotated)
    pair = [name for name in parameters.parameters if name in ("q", "k", "query", "key")]

    @wraps(rotated)
    def inplace(*args: P.args, **kwargs: P.kwargs) -> None:
        bound, results = parameters.bind(*args, **kwargs).arguments, rotated(*args, **kwargs)
        views = [HOST.view(result, name) for name, result in zip(pair, results, strict=True)]
        writes = [Written.of(name, bound[name], view.shape) for name, view in zip(pair, views, strict=True)]
        others = ("indptr", "offsets", "pos_ids", "positions", "cos_sin_cache")
        write_all(
            [(into, ..., view) for into, view in zip(writes, views, strict=True)],
            {name: bound[name] for name in others if name in bound},
        )

    inplace.__name__ = inplace.__qualname__ = f"{rotated.__name__}_inplace"
    inplace.__doc__ = f"`{rotated.__name__}`, whose results are written to {pair[0]} and {pair[1]}."
    return inplace


apply_rope_inplace = _in_place(apply_rope)
apply_rope_pos_ids_inplace = _in_place(apply_rope_pos_ids)
apply_llama31_rope_inplace = _in_place(apply_llama31_rope)
apply_llama31_rope_pos_ids_inplace = _in_place(apply_llama31_rope_pos_ids)
apply_rope_with_cos_sin_cache_inplace = _in_place(apply_rope_with_cos_sin_cache)


def _rotated(q: Any, k: Any, positions: npt.NDArray[Any], rotation: Rotation) -> tuple[Any, Any]:
    """Both arrays in their dtypes and kinds, rotated by angles."""
    head_dim = checked("q", q, [None] * 3).shape[2]
    turns, paired = rotation.turns(positions, head_dim), bool(rotation.interleave)
    queries, keys = (
        turned(floats(name, array, [len(positions), None, head_dim]), name, turns, paired)
        for name, array in (("q", q), ("k", k))
    )
    return _like(q, queries), _like(k, keys)


def turned(x: Floats, name: str, turns: Turns, interleave: bool) -> Floats:
    """Rows `[N, H, D]`, of which the first dimensions are rotated in place."""
    cos, sin = (part[:, None] for part in turns)
    half = cos.shape[2]
    if len(x) != len(cos) or 2 * half > x.shape[2]:
        raise ShapeError(f"{name}: expected {len(cos)} rows of at least {2 * half} dimensions, got {list(x.shape)}")
    whole = x[..., : 2 * half]
    pair = (whole[..., ::2], whole[..., 1::2]) if interleave else (whole[..., :half], whole[..., half:])
    with np.errstate(over="ignore", invalid="ignore"):
        pair[0][...], pair[1][...] = pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin
    return x


def turns_of_table(cos_sin_cache: Any, positions: Any, name: str) -> Turns:
    table = checked("cos_sin_cache", cos_sin_cache, [None, None], ["float32"])
    if not table.shape[1] or table.shape[1] % 2:
        raise ShapeError(f"cos_sin_cache: expected an even number of columns, got shape {list(table.shape)}")
    at = host_indices(positions, name)
    wrong = (at < 0) | (at >= len(table))
    if wrong.any():
        row = int(wrong.argmax())
        raise ContractError(f"{name}: row {row}: expected 0 to {len(table) - 1}, got {at[row]}")
    cos, sin = np.split(table[at], 2, axis=1)
    return cos, sin


def host_indices(array: Any, name: str) -> npt.NDArray[np.int32]:
    devices.require_host(array, name, "rows are rotated on the CPU alone")
    return HOST.indices(array, name)


def _positions(q: Any, indptr: Any, offsets: Any) -> npt.NDArray[np.int64]:
    """The position of each row of ragged requests."""
    starts, first = host_indices(indptr, "indptr"), host_indices(offsets, "offsets")
    check_offsets(starts, "indptr")
    check_count(starts, first, ("indptr", "offsets"))
    rows = len(checked("q", q, [None] * 3))
    if starts[-1] != rows:
        raise ShapeError(f"indptr: expected an end at q's {rows} rows, got {starts[-1]}")
    return np.arange(rows) + np.repeat(first.astype(np.int64) - starts[:-1], np.diff(starts))


def _heads(name: str, array: Any, size: int) -> Floats:
    """`[N, H * size]` or `[N, H, size]` as heads."""
    view = HOST.view(array, name)
    x = floats(name, array, [None, None, size] if view.ndim == 3 else [None, None])
    if x.shape[-1] % size:
        raise ShapeError(f"{name}: expected a multiple of head_size = {size} in a row, got shape {list(x.shape)}")
    return x.reshape(len(x), -1 if x.size else x.shape[1] // size, size)


def _like(array: Any, result: Floats) -> Any:
    """The result in the dtype, kind and shape of an array."""
    view = HOST.view(array, "q")
    return HOST.like(array, HOST.astype(result.reshape(view.shape), view.dtype))
