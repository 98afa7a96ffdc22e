"""Rotary embedding and rounding to float8: the calls of FlashInfer's `rope` module that quantise.

Letters in shapes, tables and errors are those of `rope`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, CacheArrays, DTypeLike, SupportsDLPack
from paged_kv.calls.append import WritableCache, slots_at
from paged_kv.calls.host_arrays import Written, checked, floats, write_all
from paged_kv.calls.plan import check_dtype
from paged_kv.calls.scalars import checked_number
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.flashinfer.rope import Turns, host_indices, turned, turns_of_table
from paged_kv.options import FLOAT8_DTYPES

__all__ = ["mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"]

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def rope_quantize_fp8(
    q_rope: ArrayT,
    k_rope: SupportsDLPack,
    q_nope: SupportsDLPack | None,
    k_nope: SupportsDLPack | None,
    cos_sin_cache: SupportsDLPack,
    pos_ids: SupportsDLPack,
    is_neox: bool = True,
    quantize_dtype: DTypeLike | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Any = None,
    k_rope_out: Any = None,
    q_nope_out: Any = None,
    k_nope_out: Any = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Any, Any, Any, Any]:
    """Rotates the rotary parts of q and k by a table, and rounds all parts, times their scales, to float8.

    Args:
        q_rope, q_nope: `[N, Hq, rotary_dim]` and `[N, Hq, Dn]`, None where Dn is 0.
        k_rope, k_nope: The same with Hk heads, or of one head `[N, rotary_dim]` and `[N, Dn]` (MLA).
        pos_ids: `[N]`, from 0 to P - 1.
        quantize_dtype: "float8_e4m3fn" or "float8_e5m2"; None: that of the first `..._out` there is, else the former.
            What is past its largest number becomes that.
        quant_scale_q, quant_scale_kv: Multiply q and k before they are rounded.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: Arrays that are written, and returned; None: new ones.
        enable_pdl, backend: Accepted, without effect.

    Returns:
        The four parts in float8.
    """
    del enable_pdl, backend
    outs = {"q_rope": q_rope_out, "k_rope": k_rope_out, "q_nope": q_nope_out, "k_nope": k_nope_out}
    arrays = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope}
    dtype = _float8(quantize_dtype, outs)
    scales = (quant_scale_q, quant_scale_kv)
    parts = _quantised(arrays, turns_of_table(cos_sin_cache, pos_ids, "pos_ids"), is_neox, dtype, scales)
    read = arrays | {"cos_sin_cache": cos_sin_cache, "pos_ids": pos_ids}
    q_rope_out, k_rope_out, q_nope_out, k_nope_out = _results(q_rope, parts, outs, read)
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


def mla_rope_quantize_fp8(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`rope_quantize_fp8` under the name that FlashInfer has for k of one head, `[N, rotary_dim]` and `[N, Dn]`."""
    return rope_quantize_fp8(*args, **kwargs)


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: ArrayT,
    k_rope: SupportsDLPack,
    q_nope: SupportsDLPack | None,
    k_nope: SupportsDLPack | None,
    v: SupportsDLPack | None,
    cos_sin_cache: SupportsDLPack,
    pos_ids: SupportsDLPack,
    paged_kv_cache: CacheArrays,
    kv_indices: SupportsDLPack,
    kv_indptr: SupportsDLPack,
    batch_indices: SupportsDLPack,
    positions: SupportsDLPack,
    is_neox: bool = True,
    quantize_dtype: DTypeLike | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Any = None,
    q_nope_out: Any = None,
    enable_pdl: bool = False,
) -> tuple[Any, Any]:
    """`rope_quantize_fp8`, whose K, and V times `quant_scale_kv`, go to a paged cache of that float8, as
    `page.append_paged_kv_cache` and `append_paged_mla_kv_cache` write them.

    Args:
        v: `[N, Hk, rotary_dim + Dn]`; None with k of one head (MLA).
        paged_kv_cache: As `append_paged_kv_cache` takes it, a head of K being its rotary part, then the other; or of
            MLA `(ckv_cache, kpe_cache)`, which take k_nope and k_rope.
        kv_indices, kv_indptr, batch_indices, positions: As in `append_paged_kv_cache`.
        page_size: That of the cache.

    Returns:
        q_rope and q_nope in float8.
    """
    del enable_pdl
    outs = {"q_rope": q_rope_out, "q_nope": q_nope_out}
    arrays = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope, "v": v}
    is_mla = HOST.view(k_rope, "k_rope").ndim == 2
    if is_mla != (v is None):
        raise ContractError(f"v: expected {'None' if is_mla else 'an array'} with k_rope of {2 if is_mla else 3} axes")
    if not isinstance(paged_kv_cache, tuple | list) or len(paged_kv_cache) != 2:
        raise ContractTypeError("paged_kv_cache: expected a tuple of two arrays")
    dtype = _float8(quantize_dtype, outs)
    scales = (quant_scale_q, quant_scale_kv)
    parts = _quantised(arrays, turns_of_table(cos_sin_cache, pos_ids, "pos_ids"), is_neox, dtype, scales)
    if is_mla:
        cache = WritableCache.latent_pair(*paged_kv_cache, k_rope=k_rope)
        rows = cache.rows(parts["k_nope"], parts["k_rope"], ("k_nope", "k_rope"), num_axes=2)
    else:
        cache = WritableCache.paged(paged_kv_cache, kv_layout, "paged_kv_cache", k_rope=k_rope)
        keys = np.concatenate([parts["k_rope"], parts["k_nope"]], axis=-1)
        rows = cache.rows(keys, parts["v"], ("k_rope", "v"))
    if integer("page_size", page_size, 1, LARGEST_INDEX) != cache.pages.page_size:
        raise ShapeError(f"page_size: expected paged_kv_cache's {cache.pages.page_size}, got {page_size}")
    table = {"kv_indptr": kv_indptr, "kv_indices": kv_indices}
    full = np.full(max(len(host_indices(kv_indptr, "kv_indptr")) - 1, 0), page_size, np.int32)
    at = {"batch_indices": batch_indices, "positions": positions}
    slots = slots_at(cache.pages, len(rows[0]), **at, **table, kv_last_page_len=full)
    read = arrays | at | table | {"cos_sin_cache": cos_sin_cache, "pos_ids": pos_ids}
    read |= {f"paged_kv_cache[{i}]": array for i, array in enumerate(paged_kv_cache)}
    q_rope_out, q_nope_out = _results(q_rope, parts, outs, read)
    cache.write(rows, slots)
    return q_rope_out, q_nope_out


def _float8(quantize_dtype: Any, outs: dict[str, Any]) -> np.dtype[Any]:
    name, dtype = "quantize_dtype", np.dtype(ml_dtypes.float8_e4m3fn)
    if quantize_dtype is not None:
        dtype = dtype_of(quantize_dtype, name)
    elif out := next((each for each in outs if outs[each] is not None), None):
        name, dtype = f"{out}_out", HOST.view(outs[out], f"{out}_out").dtype
    check_dtype(f"{name}: dtype", dtype, FLOAT8_DTYPES)
    return dtype


def _quantised(
    arrays: dict[str, Any], turns: Turns, is_neox: Any, dtype: np.dtype[Any], scales: tuple[Any, Any]
) -> dict[str, np.ndarray]:
    """The parts in float8, rotated if their name says so."""
    number = len(turns[0]), 2 * turns[0].shape[1]
    heads = checked("q_rope", arrays["q_rope"], [None] * 3).shape[1]
    k_rope = HOST.view(arrays["k_rope"], "k_rope")
    of_k = [*k_rope.shape[1:2]] if k_rope.ndim != 2 else []
    factors = [checked_number(scale, f"quant_scale_{which}") for scale, which in zip(scales, ("q", "kv"), strict=True)]
    largest, parts = np.float32(_LARGEST[dtype.name]), {}
    for name, array in arrays.items():
        shape = [number[0], *([heads] if name[0] == "q" else of_k), number[1] if name.endswith("rope") else None]
        x = np.zeros([*shape[:-1], 0], np.float32) if array is None else floats(name, array, shape)
        if name.endswith("rope"):
            turned(x if x.ndim == 3 else x[:, None], name, turns, not flag("is_neox", is_neox))
        with np.errstate(over="ignore", invalid="ignore"):
            parts[name] = np.clip(x * np.float32(factors[name[0] != "q"]), -largest, largest).astype(dtype)
    return parts


def _results(q: Any, parts: dict[str, np.ndarray], outs: dict[str, Any], read: dict[str, Any]) -> list[Any]:
    """The parts that are returned: written to the arrays there are, else in the kind of q."""
    writes = {
        name: Written.of(f"{name}_out", out, parts[name].shape, [parts[name].dtype.name])
        for name, out in outs.items()
        if out is not None
    }
    write_all([(into, ..., parts[name]) for name, into in writes.items()], read)
    return [HOST.like(q, parts[name]) if out is None else out for name, out in outs.items()]
