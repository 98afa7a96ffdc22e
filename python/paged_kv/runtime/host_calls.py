"""Calls of the ops over arrays on the host: a struct of 64-bit numbers is packed, and a library of kernels called.

The operands are those of `Variant.build`, NumPy arrays that are C-contiguous; K and V are `Memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 and float8 by name)
import numpy as np
from max.dtype import DType

from paged_kv.call_layouts import (
    APPEND,
    ATTENTION,
    CACHE,
    CACHE_STORAGE,
    CACHE_TABLE,
    CACHE_VIEW,
    CALLS,
    GATHER,
    LATENT,
    MASKS,
    MEMBER,
    MERGE,
    RECURRENCE,
    SOFTMAX_OPTIONS,
    TOKEN_ROWS,
    named,
)
from paged_kv.graphs.encodings import ENCODINGS, Encoding, block_bytes, block_elements
from paged_kv.runtime.libraries import COPIED, Kernel, built_encodings, kernel, load
from paged_kv.runtime.thread_pool import workers
from paged_kv.runtime.variants import Variant

Array = np.ndarray[Any, Any]


class Memory(Protocol):
    """Elements side by side in the host's memory (`arrays.types.HostMemory`)."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


def execute(variant: Variant, *inputs: Any, sources: Path | None = None) -> list[Array]:
    """The outputs of a variant, in fresh memory; its kernel is compiled from `sources`, the package's where None.

    Raises:
        ContractError: what the kernel refuses.
        ToolchainError: as `libraries.kernel`.
    """
    called, operands, outputs = _CALLS[variant.op](variant, inputs)
    kernel(called.kind, *called.dtypes, sources=sources)(operands + workers())
    return outputs


def multiply(
    kind: str,
    x: Array,
    weights: Sequence[LayerWeight],
    experts: Array | None = None,
    *,
    mask: int = 0,
    sources: Path | None = None,
) -> list[Array]:
    """`y_i = x w_i^T` of linear layers of the same x, in x's dtype and fresh memory.

    Args:
        kind: "linear", "experts", "quantised_linear" or "quantised_experts".
        x: `[M, K]`.
        weights: `[N, K]`, or blocks of it; of experts stacks `[E, ...]`.
        experts: `[R]` int32, R a multiple of M: the expert of each row.
        mask: The bits of the encodings of weights in blocks.
        sources: As `execute`.
    """
    m, k = x.shape
    rows = m if experts is None else len(experts)
    ys = [np.empty((rows, each.w.shape[-2]), x.dtype) for each in weights]
    members = np.array(
        [
            MEMBER.flat(y=_at(y), w=_at(each.w), n=y.shape[1], row_bytes=each.w.shape[-1], encoding=each.encoding)
            for y, each in zip(ys, weights, strict=True)
        ],
        np.int64,
    )
    operands = {"members": _at(members), "count": len(ys), "x": _at(x), "m": m, "k": k}
    if experts is not None:
        operands |= {"experts": _at(experts), "rows": rows, "num_experts": weights[0].w.shape[0]}
    dtypes = (x.dtype.name,) if mask else (x.dtype.name, weights[0].w.dtype.name)
    kernel(kind, *dtypes, mask=mask, sources=sources)(CALLS[kind].pack(**operands) + workers())
    return ys


def dequantise(blocks: Array, encoding: Encoding, *, mask: int, sources: Path | None = None) -> Array:
    """The weights `[N, K]` float32 that blocks uint8 `[N, bytes of a row]` mean, in fresh memory.

    Args:
        mask: The bits of the encodings of the library that is used.
        sources: As `execute`.
    """
    count, size = blocks.shape
    y = np.empty((count, size // block_bytes(encoding) * block_elements(encoding)), np.float32)
    rows = np.arange(count, dtype=np.int32)
    operands = named("y w rows", map(_at, (y, blocks, rows))) | {"count": count, "available": count}
    operands |= {"k": y.shape[1], "row_bytes": size, "encoding": ENCODINGS.index(encoding)}
    called = kernel("quantised_rows", "float32", mask=built_encodings("float32", mask), sources=sources)
    called(CALLS["quantised_rows"].pack(**operands) + workers())
    return y


def recur(
    kind: str,
    o: Array,
    x: Array,
    decays: Array,
    rates: Array,
    matrices: Array,
    *,
    offsets: Array,
    sources: Array,
    save_offsets: Array,
    save_counts: Array,
    save_slots: Array,
    key_heads: int,
    scale: float,
    normed: bool,
) -> None:
    """Computes `o` `[T, H, V]` and the states that are saved (`mojo_ops/recurrent/call.mojo`), all float32.

    Args:
        kind: "delta_rule" or "selective_scan".
        o: The outputs.
        x: `[T, 2 Hk K + H V]`: queries, keys and values.
        decays, rates: `[T, H]`.
        matrices: `[slots, H, blocks, K, 16]`, changed in place.
        offsets, sources, save_offsets, save_counts, save_slots: As in `graphs.inputs.StateInputs`, of `B` requests.
        key_heads: Hk.
        scale: Multiplies q.
        normed: q and k are divided by their lengths.
    """
    skip, numbers = np.zeros(o.shape[1], np.float32), np.array([scale], np.float32)
    operands = RECURRENCE.pack(
        **_addresses(o=o, x=x, decays=decays, rates=rates, skip=skip, matrices=matrices, numbers=numbers),
        **_addresses(offsets=offsets, sources=sources, save_offsets=save_offsets, counts=save_counts, slots=save_slots),
        **named("rows heads value_dim", o.shape),
        **named("requests key_dim width", (len(sources), matrices.shape[3], x.shape[1])),
        key_heads=key_heads,
        normed=int(normed),
    )
    kernel(kind, "float32")(operands + workers())


class LayerWeight(NamedTuple):
    """The weight of a linear layer."""

    w: Array
    """`[N, K]`, or uint8 `[N, bytes of a row]` in blocks; of experts `[E, ...]`."""
    encoding: int = 0
    """The index of the encoding of blocks."""


def load_variants(variants: Iterable[Variant]) -> None:
    """Loads what `execute` of some variants calls.

    Raises:
        ToolchainError: as `libraries.kernel`.
    """
    load([variant_kernel(variant) for variant in variants])


@lru_cache(256)
def variant_kernel(variant: Variant, *, rotated: bool = False) -> Kernel:
    """The kernel that computes a variant."""
    rows, cache = variant.dtype.name, variant.kv_dtype.name
    if variant.op == "merge":
        return Kernel("merge", (rows,))
    if variant.op in ("append", "gather"):
        if rows == cache:
            rows = cache = COPIED[variant.dtype.size_in_bytes]
        return Kernel(variant.op, (rows, cache))
    o = (variant.o_dtype or variant.dtype).name
    kind = "latent" if variant.op == "mla_attention" else variant.op + ("_rotated" if rotated else "")
    return Kernel(kind, (rows, cache, o))


VariantCall: TypeAlias = tuple[Kernel, bytes, list[Array]]
"""The kernel, its operands but for the threads, and the outputs that they name."""


def _attention(variant: Variant, inputs: tuple[Any, ...]) -> VariantCall:
    q, row_batch, row_lengths, *rest = inputs
    masks, value_dim = _NO_MASKS, q.shape[2]
    if variant.op == "masked_attention":
        masks, value_dim, rest = _masks(rest[:5]), len(rest[5]), rest[6:]
    k, v, table, view, slopes, sinks, window_left, options = rest
    o, lse = _outputs(variant, q.shape[0], q.shape[1], value_dim)
    operands = ATTENTION.pack(
        o=_at(o),
        lse=_at(lse),
        q=_at(q),
        num_rows=q.shape[0],
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        value_dim=value_dim,
        row_batch=_at(row_batch),
        row_lengths=_at(row_lengths),
        masks=masks,
        slopes=_at(slopes),
        num_slopes=len(slopes),
        sinks=_at(sinks),
        num_sinks=len(sinks),
        window_left=int(window_left),
        options=_at(options),
        cache=_cache(k, v, table, view),
    )
    return variant_kernel(variant, rotated=bool(options[_ROPE_THETA])), operands, [o, lse]


def _masks(arrays: Sequence[Array]) -> bytes:
    return MASKS.pack(
        **named("row_positions token_offsets mask mask_starts mask_firsts", map(_at, arrays)),
        **named("num_positions num_offsets mask_bytes num_starts num_firsts", map(len, arrays)),
    )


def _latent(variant: Variant, inputs: tuple[Any, ...]) -> VariantCall:
    q_nope, q_pe, row_batch, row_lengths, kpe, ckv, table, view, sinks, options = inputs
    o, lse = _outputs(variant, *q_nope.shape)
    operands = LATENT.pack(
        **_addresses(o=o, lse=lse, q_nope=q_nope, q_pe=q_pe, row_batch=row_batch, row_lengths=row_lengths),
        **_addresses(sinks=sinks, options=options),
        **named("num_rows num_heads pe_dim", q_pe.shape),
        **named("nope_dim num_sinks", (q_nope.shape[2], len(sinks))),
        cache=_cache(kpe, ckv, table, view),
    )
    return variant_kernel(variant), operands, [o, lse]


def _merge(variant: Variant, inputs: tuple[Any, ...]) -> VariantCall:
    v, s = inputs
    rows, _, heads, head_dim = v.shape
    merged_v = np.empty((rows, heads, head_dim), v.dtype)
    merged_s = np.empty((rows, heads), np.float32)
    addresses = _addresses(merged_v=merged_v, merged_s=merged_s, v=v, s=s)
    operands = MERGE.pack(**addresses, **named("num_rows num_states num_heads head_dim", v.shape))
    return variant_kernel(variant), operands, [merged_v, merged_s]


def _append(variant: Variant, inputs: tuple[Any, ...]) -> VariantCall:
    k_rows, v_rows, batch_indices, positions, k, v, table, view = inputs
    where = _addresses(batch_indices=batch_indices, positions=positions)
    rows = _token_rows(k_rows, v_rows)
    return variant_kernel(variant), APPEND.pack(rows=rows, **where, cache=_cache(k, v, table, view)), []


def _gather(variant: Variant, inputs: tuple[Any, ...]) -> VariantCall:
    indptr, like, k, v, table, view = inputs
    outputs = [np.empty(like.shape, _numpy(variant.dtype)) for _ in range(2)]
    rows = _token_rows(*outputs)
    return variant_kernel(variant), GATHER.pack(rows=rows, indptr=_at(indptr), cache=_cache(k, v, table, view)), outputs


def _token_rows(k: Array, v: Array) -> bytes:
    sizes = named("count k_heads k_dim", k.shape) | named("_ v_heads v_dim", v.shape)
    return TOKEN_ROWS.pack(k=_at(k), v=_at(v), **sizes)


_CALLS: dict[str, Callable[[Variant, tuple[Any, ...]], VariantCall]] = {
    "attention": _attention,
    "masked_attention": _attention,
    "mla_attention": _latent,
    "merge": _merge,
    "append": _append,
    "gather": _gather,
}
_ROPE_THETA = SOFTMAX_OPTIONS.index("rope_theta")
_NO_MASKS = MASKS.zeros


def _outputs(variant: Variant, rows: int, heads: int, head_dim: int) -> tuple[Array, Array]:
    dtype = _numpy(variant.o_dtype or variant.dtype)
    return np.empty((rows, heads, head_dim), dtype), np.empty((rows, heads), np.float32)


def _cache(k: Memory, v: Memory, table: Array, view: Array) -> bytes:
    """Both and their table; a view without V's head_dim is of a V that has K's."""
    numbers = view.tolist()
    if len(numbers) < _VIEW_SIZE:
        numbers.append(numbers[_K_DIM])
    storage = CACHE_STORAGE.pack(k.address, k.size, v.address, v.size)
    return storage + CACHE_VIEW.pack(*numbers) + CACHE_TABLE.pack(_at(table), *table.shape)


_VIEW_SIZE = CACHE_VIEW.size // 8
_K_DIM = CACHE.index("k_dim") - CACHE.index("pages")


def _addresses(**arrays: Array) -> dict[str, int]:
    return {name: _at(array) for name, array in arrays.items()}


def _at(array: Array) -> int:
    """The address of an array's memory; 0 where it has none, since MAX's buffers without elements lie nowhere."""
    address: int = array.__array_interface__["data"][0] if array.size else 0
    return address


def _numpy(dtype: DType) -> np.dtype[Any]:
    return np.dtype(dtype.name)
