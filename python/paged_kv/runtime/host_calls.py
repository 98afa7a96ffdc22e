"""Calls of the ops over arrays on the host: a struct of 64-bit numbers is packed, and a library of kernels called.

The operands are those of `Variant.build`, NumPy arrays that are C-contiguous; K and V are `Memory`. The numbers are
in the order of the structs of `mojo_ops`: `attention/call.mojo`, `attention/latent_call.mojo`,
`attention/merge_states.mojo`, `transfer/call.mojo`, `linear/call.mojo` and `recurrent/call.mojo`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 and float8 by name)
import numpy as np
from max.dtype import DType

from paged_kv.runtime.libraries import COPIED, Kernel, kernel, load
from paged_kv.runtime.team import workers
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
    wanted, operands, outputs = _CALLS[variant.op](variant, inputs)
    kernel(wanted.kind, *wanted.dtypes, sources=sources)(operands + workers())
    return outputs


def multiply(
    kind: str,
    x: Array,
    weights: Sequence[Weight],
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
            (_at(y), _at(each.w), y.shape[1], each.w.shape[-1], each.encoding)
            for y, each in zip(ys, weights, strict=True)
        ],
        np.int64,
    )
    numbers = [_at(members), len(ys), _at(x)]
    if experts is not None:
        numbers += [_at(experts), rows]
    numbers += [m, *([weights[0].w.shape[0]] if experts is not None else []), k]
    dtypes = (x.dtype.name,) if mask else (x.dtype.name, weights[0].w.dtype.name)
    kernel(kind, *dtypes, mask=mask, sources=sources)(np.array(numbers, np.int64).tobytes() + workers())
    return ys


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
    rows, heads, value_dim = o.shape
    skip, numbers = np.zeros(heads, np.float32), np.array([scale], np.float32)
    tables = (offsets, sources, save_offsets, save_counts, save_slots)
    addresses = [*map(_at, (o, x, decays, rates, skip, matrices, *tables))]
    sizes = [len(sources), rows, heads, key_heads, matrices.shape[3], value_dim, x.shape[1], int(normed)]
    packed = np.array([*addresses, *sizes, _at(numbers)], np.int64)
    kernel(kind, "float32")(packed.tobytes() + workers())


class Weight(NamedTuple):
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
    load([kernel_of(variant) for variant in variants])


@lru_cache(256)
def kernel_of(variant: Variant, *, rotated: bool = False) -> Kernel:
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


Call: TypeAlias = tuple[Kernel, bytes, list[Array]]
"""The kernel, its operands but for the threads, and the outputs that they name."""


def _attention(variant: Variant, inputs: tuple[Any, ...]) -> Call:
    q, row_batch, row_lengths, *rest = inputs
    masks, value_dim = _NO_MASKS, q.shape[2]
    if variant.op == "masked_attention":
        *given, head_of_v = rest[:6]
        rest, value_dim = rest[6:], len(head_of_v)
        masks = _MASKS.pack(*(number for array in given for number in (_at(array), len(array))))
    k, v, table, view, slopes, sinks, window_left, options = rest
    o, lse = _outputs(variant, q.shape[0], q.shape[1], value_dim)
    rows = _ROWS.pack(_at(o), _at(lse), _at(q), *q.shape, value_dim, _at(row_batch), _at(row_lengths))
    logits = _LOGITS.pack(_at(slopes), len(slopes), _at(sinks), len(sinks), int(window_left), _at(options))
    rotated = bool(options[_ROPE_THETA])
    return kernel_of(variant, rotated=rotated), rows + masks + logits + _cache(k, v, table, view), [o, lse]


def _latent(variant: Variant, inputs: tuple[Any, ...]) -> Call:
    q_nope, q_pe, row_batch, row_lengths, kpe, ckv, table, view, sinks, options = inputs
    o, lse = _outputs(variant, q_pe.shape[0], q_pe.shape[1], q_nope.shape[2])
    operands = _LATENT.pack(
        *(_at(o), _at(lse), _at(q_nope), _at(q_pe), *q_pe.shape[:2], q_nope.shape[2], q_pe.shape[2]),
        *(_at(row_batch), _at(row_lengths), _at(sinks), len(sinks), _at(options)),
    )
    return kernel_of(variant), operands + _cache(kpe, ckv, table, view), [o, lse]


def _merge(variant: Variant, inputs: tuple[Any, ...]) -> Call:
    v, s = inputs
    rows, states, heads, head_dim = v.shape
    merged_v = np.empty((rows, heads, head_dim), v.dtype)
    merged_s = np.empty((rows, heads), np.float32)
    addresses = _at(merged_v), _at(merged_s), _at(v), _at(s)
    return kernel_of(variant), _MERGE.pack(*addresses, rows, states, heads, head_dim), [merged_v, merged_s]


def _append(variant: Variant, inputs: tuple[Any, ...]) -> Call:
    k_rows, v_rows, batch_indices, positions, k, v, table, view = inputs
    rows = _TOKENS.pack(_at(k_rows), _at(v_rows), *k_rows.shape, *v_rows.shape[1:])
    where = _WHERE.pack(_at(batch_indices), _at(positions))
    return kernel_of(variant), rows + where + _cache(k, v, table, view), []


def _gather(variant: Variant, inputs: tuple[Any, ...]) -> Call:
    indptr, like, k, v, table, view = inputs
    found = [np.empty(like.shape, _numpy(variant.dtype)) for _ in range(2)]
    rows = _TOKENS.pack(*map(_at, found), *like.shape, *like.shape[1:])
    return kernel_of(variant), rows + _ADDRESS.pack(_at(indptr)) + _cache(k, v, table, view), found


_CALLS: dict[str, Callable[[Variant, tuple[Any, ...]], Call]] = {
    "attention": _attention,
    "masked_attention": _attention,
    "mla_attention": _latent,
    "merge": _merge,
    "append": _append,
    "gather": _gather,
}
_ROPE_THETA = 3
"""Its place among the options of attention."""
_ROWS = struct.Struct("<9q")
_MASKS = struct.Struct("<10q")
_NO_MASKS = bytes(_MASKS.size)
_LOGITS = struct.Struct("<6q")
_LATENT = struct.Struct("<13q")
_MERGE = struct.Struct("<8q")
_TOKENS = struct.Struct("<7q")
_WHERE = struct.Struct("<2q")
_ADDRESS = struct.Struct("<q")
_MEMORY = struct.Struct("<4q")
_TABLE = struct.Struct("<3q")


def _outputs(variant: Variant, rows: int, heads: int, head_dim: int) -> tuple[Array, Array]:
    dtype = _numpy(variant.o_dtype or variant.dtype)
    return np.empty((rows, heads, head_dim), dtype), np.empty((rows, heads), np.float32)


def _cache(k: Memory, v: Memory, table: Array, view: Array) -> bytes:
    """`CacheMemory`."""
    numbers = view.tobytes()
    if len(view) == _SAME_WIDTH:
        numbers += numbers[_HEAD_DIM]
    return _MEMORY.pack(k.address, k.size, v.address, v.size) + numbers + _TABLE.pack(_at(table), *table.shape)


_SAME_WIDTH = 12
"""Numbers of a view whose V has K's head_dim."""
_HEAD_DIM = slice(24, 32)


def _at(array: Array) -> int:
    """The address of an array's memory; 0 where it has none, since MAX's buffers without elements lie nowhere."""
    address: int = array.__array_interface__["data"][0] if array.size else 0
    return address


def _numpy(dtype: DType) -> np.dtype[Any]:
    return np.dtype(dtype.name)
