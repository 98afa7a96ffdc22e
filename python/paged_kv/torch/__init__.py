"""torch operators over paged caches on a CPU: they run eagerly, and inside `torch.compile(fullgraph=True)`.

    from paged_kv.torch import append_paged_kv, gather_paged_kv, linear, paged_attention

The functions call `torch.ops.paged_kv.*`, whose kernels are those of all other calls of this package. A page table is
`block_tables [B, n]`, int32, and `seq_lens [B]`, int32: the first `ceil(seq_lens[b] / page_size)` entries of row b are
request b's pages in token order, what follows may be anything.

A cache is two tensors, K and V `[pages, page_size, Hk, D]`, with any strides of which the last is 1. With `layer` they
are those of all layers, `[L, pages, page_size, Hk, D]`. Where `v_cache` is None, `k_cache` holds both, K first:
`[2, pages, page_size, Hk, D]`, or with `layer` `[L, 2, pages, page_size, Hk, D]`; `transpose` gives a tensor of another
order these shapes. In a function that `torch.compile` compiles, an append takes whole tensors, or views that were made
outside; a view that is made inside is refused where its place in its tensor depends on a size that may change.

A cache of int8 holds int8 codes with a scale a token and head, one of uint8 int4 codes: its last dimension is the bytes
of such a head, D + 4 or D / 2 + 4, of which q and the rows of an append and a gather have the D elements.

No operator has a derivative. A call with a tensor that requires a gradient is refused while torch records gradients:
call it under `torch.inference_mode()` or `torch.no_grad()`.

Letters in shapes: B requests, R query rows, N tokens, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import Library, register_fake

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.autograd_writes import refuse_gradients
from paged_kv.arrays.host import as_indices
from paged_kv.calls.block_tables import block_entries, checked_lengths
from paged_kv.calls.kv_copy import Slots
from paged_kv.calls.offsets import check_offsets
from paged_kv.calls.ragged import RaggedBatch
from paged_kv.calls.remembered_plan import RememberedPlan
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import BLOCK_NAMES, Table
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.kv_formats import FORMATS
from paged_kv.options import check_number, stored_elements
from paged_kv.torch.attention import planned
from paged_kv.torch.cache import append, check_caches, check_ranks, checked_append, gather, pages_of
from paged_kv.torch.products import multiply

__all__ = ["append_paged_kv", "gather_paged_kv", "linear", "paged_attention"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: bool = False,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of query rows over the pages of their requests: decode, or causal prefill of ragged rows.

    Args:
        q: `[R, Hq, D]` float32, bfloat16 or float16.
        k_cache, v_cache: `[pages, page_size, Hk, D]` in q's dtype, float8, or codes; see above for other layouts.
        block_tables: `[B, n]`.
        seq_lens: `[B]`, tokens of each request, its new ones included.
        qo_indptr: `[B + 1]` int32: rows `qo_indptr[b]` to `qo_indptr[b + 1]` of q are request b's last tokens, each of
            which sees the tokens up to itself. None: one row a request, R = B.
        sm_scale: Multiplies q . k; `1 / sqrt(D)` where None.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; 0 is off.
        sinks: `[Hq]` natural-log logits that join the denominator, and the lse.
        alibi: Whether ALiBi's slopes are added to the scores.
        layer: The layer whose pages are read, of a cache of all layers.

    Returns:
        o `[R, Hq, D]` in q's dtype, and the base-2 lse `[R, Hq]` float32: 0 and -inf for a row that sees no token.

    Raises:
        ContractTypeError: a tensor has another dtype or device, or requires a gradient.
        ShapeError: a rank, shape, head count or head_dim does not fit.
        PageTableError: a page id is not one of the cache's; a length or an offset is out of range.
        ContractError: a number is out of range.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(q=q, k_cache=k_cache, block_tables=block_tables, seq_lens=seq_lens)
        _check_tensors_or_none(v_cache=v_cache, qo_indptr=qo_indptr, sinks=sinks)
        if sm_scale is not None:
            check_number("sm_scale", sm_scale)
        check_number("logits_soft_cap", logits_soft_cap)
        window_left, alibi = integer("window_left", window_left, -1, LARGEST_INDEX), flag("alibi", alibi)
        layer = _checked_layer(layer)
    options = sm_scale, window_left, logits_soft_cap, sinks, alibi, layer
    return torch.ops.paged_kv.paged_attention(q, k_cache, v_cache, block_tables, seq_lens, qo_indptr, *options)


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    *,
    layer: int | None = None,
) -> None:
    """Writes N tokens into their pages, in place: a write that torch's autograd counts as it counts its own.

    Args:
        k, v: `[N, Hk, D]` in the cache's dtype, or floats for a cache of codes, which are quantised: row i is token
            `positions[i]` of request `batch_indices[i]`.
        k_cache, v_cache: `[pages, page_size, Hk, D]`, of which no two elements share memory; other layouts: above.
        block_tables: `[B, n]`; a row ends at its first -1.
        batch_indices, positions: `[N]` int32; a row of request -1 is skipped.
        layer: The layer whose pages are written, of a cache of all layers.

    Raises:
        ContractTypeError, ShapeError: as `paged_attention`.
        PageTableError: a position is outside its request's pages, a page id is not one of the cache's, or two rows are
            for one slot. Nothing was written, as with every error.
        ContractError: K and V of the cache share memory; there is no such layer; or, while `torch.compile` compiles,
            the cache is a view whose place in its tensor depends on a size that may change.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(k=k, v=v, k_cache=k_cache)
        _check_tensors(block_tables=block_tables, batch_indices=batch_indices, positions=positions)
        _check_tensors_or_none(v_cache=v_cache)
        layer = _checked_layer(layer)
    torch.ops.paged_kv.append_paged_kv(k, v, k_cache, v_cache, block_tables, batch_indices, positions, layer)


def gather_paged_kv(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens of every request, out of their pages: k and v `[num_tokens, Hk, D]`, request after request, in the
    cache's dtype, or of codes the numbers that they stand for, float32.

    Args:
        k_cache, v_cache: `[pages, page_size, Hk, D]`; see above for other layouts.
        block_tables: `[B, n]`.
        seq_lens: `[B]`, tokens of each request.
        num_tokens: Their sum: the shape of the result, which `torch.compile` has to know.
        layer: The layer whose pages are read, of a cache of all layers.

    Raises:
        ContractTypeError, PageTableError: as `paged_attention`.
        ShapeError: also where `num_tokens` is another number.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(k_cache=k_cache, block_tables=block_tables, seq_lens=seq_lens)
        _check_tensors_or_none(v_cache=v_cache)
        num_tokens, layer = integer("num_tokens", num_tokens, 0, LARGEST_INDEX), _checked_layer(layer)
    return torch.ops.paged_kv.gather_paged_kv(k_cache, v_cache, block_tables, seq_lens, num_tokens, layer)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """`x w^T`: a linear layer, for few rows of bfloat16 faster than torch's on CPUs without AMX.

    Args:
        x: `[M, K]` float32, bfloat16 or float16.
        w: `[N, K]` in x's dtype.

    Returns:
        `[M, N]` in x's dtype, accumulated in float32.

    Raises:
        ContractTypeError, ShapeError: a tensor has another dtype, device or shape, or requires a gradient.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(x=x, w=w)
    return torch.ops.paged_kv.linear(x, w)


_LIBRARY: Any = Library("paged_kv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_tables, Tensor seq_lens,"
    " Tensor? qo_indptr, float? sm_scale, SymInt window_left, float logits_soft_cap, Tensor? sinks, bool alibi,"
    " SymInt? layer=None) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "append_paged_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor block_tables,"
    " Tensor batch_indices, Tensor positions, SymInt? layer=None) -> ()"
)
_LIBRARY.define(
    "gather_paged_kv(Tensor k_cache, Tensor? v_cache, Tensor block_tables, Tensor seq_lens, SymInt num_tokens,"
    " SymInt? layer=None) -> (Tensor, Tensor)"
)
_LIBRARY.define("linear(Tensor x, Tensor w) -> Tensor")


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    alibi: bool,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    _check_q(q)
    k_cache, v_cache = pages_of(k_cache, v_cache, layer)
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    attention = planned(
        (q.shape[1], num_kv_heads, head_dim, page_size),
        (q.dtype, k_cache.dtype),
        (sm_scale, window_left, logits_soft_cap, alibi),
    )
    sizes = page_size, q.shape[0]
    rows = _rows.of(sizes, block_tables=block_tables, seq_lens=seq_lens, qo_indptr=qo_indptr)
    return attention.over_pages(rows, q, k_cache, v_cache, sinks)


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    layer: int | None = None,
) -> None:
    refuse_gradients(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    k_cache, v_cache = pages_of(k_cache, v_cache, layer)
    of_cache = checked_append(k, v, k_cache, v_cache)
    sizes = k.shape[0], k_cache.shape[1], k_cache.shape[0]
    slots = _slots.of(sizes, block_tables=block_tables, batch_indices=batch_indices, positions=positions)
    append(k, v, k_cache, v_cache, of_cache, slots)


def _gather(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_gradients(k_cache=k_cache, v_cache=v_cache)
    k_cache, v_cache = pages_of(k_cache, v_cache, layer)
    check_caches(k_cache=k_cache, v_cache=v_cache)
    rows = _requests.of((k_cache.shape[1], None), block_tables=block_tables, seq_lens=seq_lens, qo_indptr=None)
    count = int(rows.lengths.sum(dtype=np.int64))
    if count != integer("num_tokens", num_tokens, 0):
        raise ShapeError(f"num_tokens is {num_tokens}, the requests have {count} (seq_lens)")
    return gather(k_cache, v_cache, rows.table)


def _linear(x: Tensor, w: Tensor) -> Tensor:
    refuse_gradients(x=x, w=w)
    return multiply(x, w)


def _new_rows(
    page_size: int, num_rows: int | None, block_tables: Tensor, seq_lens: Tensor, qo_indptr: Tensor | None
) -> Rows:
    """The rows of a call of attention, or with None the requests of a gather."""
    table = Table.padded(block_tables, checked_lengths(seq_lens), page_size)
    if qo_indptr is None:
        return Rows.of_decode(table)
    offsets = as_indices(qo_indptr, "qo_indptr")
    check_offsets(offsets, "qo_indptr", table.batch_size)
    if offsets[-1] != num_rows:  # before anything of that length is made
        raise ShapeError(f"qo_indptr ends at {offsets[-1]}, q has {num_rows} rows")
    return RaggedBatch(offsets, table).rows


def _new_slots(
    num_rows: int, page_size: int, num_pages: int, block_tables: Tensor, batch_indices: Tensor, positions: Tensor
) -> Slots:
    """Return where the rows of an append go."""
    entries = block_entries(block_tables, block_tables.shape[0] if block_tables.dim() else 0)
    table = Table.dense(entries, np.full(len(entries), page_size, np.int32), page_size, BLOCK_NAMES)
    requests, at = as_indices(batch_indices, "batch_indices"), as_indices(positions, "positions")
    for indices, name in ((requests, "batch_indices"), (at, "positions")):
        if len(indices) != num_rows:
            raise ShapeError(f"{name} has {len(indices)} entries, there are {num_rows} rows to append")
    return Slots(*table.slots(requests, at, num_pages))


def _check_tensors(**tensors: Any) -> None:
    """Refuses what torch itself would refuse in words of its own, or compute on another device.

    Raises:
        ContractTypeError: an argument is no tensor, or none of plain memory on the CPU.
    """
    for name, tensor in tensors.items():
        if type(tensor) is Tensor and _is_plain(tensor):
            continue
        if not isinstance(tensor, Tensor):
            raise ContractTypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
        if not _is_plain(tensor):
            kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ContractTypeError(
                f"{name} is a {kind} tensor on {tensor.device}: it must be a strided one on the CPU"
            )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _check_tensors_or_none(**tensors: Any) -> None:
    _check_tensors(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


def _checked_layer(layer: Any) -> int | None:
    return None if layer is None else integer("layer", layer, 0, LARGEST_INDEX)


def _check_q(q: Tensor) -> None:
    """The shapes of attention's results follow from that of q."""
    if q.dim() != 3:
        raise ShapeError(f"q: expected 3 dimensions, got shape {tuple(q.shape)}")


def _refuse_misplaced(**caches: Tensor | None) -> None:
    """Refuses to compile a write to a view that torch's compiler would write elsewhere.

    The compiler makes the view anew. Inductor has no lowering for a storage offset that is computed from sizes, and
    takes 0 (pytorch#198068); the offset of a view that was made outside is a symbol of its own, of which the compiled
    function gets the value. A slice is made anew with its start counted from the storage, of a tensor that does not
    begin there.

    Raises:
        ContractError: as said.
    """
    for name, cache in caches.items():
        if cache is None:
            continue
        offset = cache.storage_offset()
        base = cache._inference_mode_base if torch.is_inference_mode_enabled() else cache._base  # type: ignore[attr-defined]
        base = cache if base is None else base
        if not isinstance(offset, int):
            sizes = [*cache.shape, *cache.stride(), *base.shape, *base.stride()]
            symbol = offset.node.expr
            if not symbol.is_Symbol or any(not isinstance(n, int) and n.node.expr == symbol for n in sizes):
                raise ContractError(
                    _misplaced(name, f"depends on sizes that may change (storage offset {offset}; pytorch#198068)")
                )
        begin = base.storage_offset()
        is_slice = cache.stride() == base.stride() and cache.shape != base.shape
        if is_slice and not (isinstance(begin, int) and begin == 0):
            raise ContractError(_misplaced(name, f"is counted from another view (storage offset {begin})"))


def _misplaced(name: str, place: str) -> str:
    return (
        f"{name} is a view that was made inside a compiled function, and its place in its tensor {place}: torch.compile"
        " would write elsewhere. Give the whole tensor and layer=, or make the view outside;"
        " docs/torch.md has an example"
    )


def _fake_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    alibi: bool,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    del block_tables, seq_lens, qo_indptr, sm_scale, window_left, logits_soft_cap, alibi
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    _check_q(q)
    check_ranks(k_cache, v_cache, layer)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    layer: int | None = None,
) -> None:
    del block_tables, batch_indices, positions
    refuse_gradients(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_ranks(k_cache, v_cache, layer)
    _refuse_misplaced(k_cache=k_cache, v_cache=v_cache)


def _fake_gather(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    del block_tables, seq_lens
    refuse_gradients(k_cache=k_cache, v_cache=v_cache)
    check_ranks(k_cache, v_cache, layer)
    outputs = []
    for cache in (k_cache, k_cache if v_cache is None else v_cache):
        kv_format = FORMATS.get(str(cache.dtype).removeprefix("torch."))
        shape = (num_tokens, cache.shape[-2], stored_elements(kv_format or "", cache.shape[-1]))
        outputs.append(cache.new_empty(shape, dtype=torch.float32 if kv_format else cache.dtype))
    return outputs[0], outputs[1]


def _fake_linear(x: Tensor, w: Tensor) -> Tensor:
    refuse_gradients(x=x, w=w)
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dim() != 2:
            raise ShapeError(f"{name}: expected 2 dimensions, got shape {tuple(tensor.shape)}")
    return x.new_empty((x.shape[0], w.shape[0]))


_rows, _requests = RememberedPlan(_new_rows), RememberedPlan(_new_rows)
_slots = RememberedPlan(_new_slots)

for _name, _kernel, _fake in (
    ("paged_attention", _attention, _fake_attention),
    ("append_paged_kv", _append, _fake_append),
    ("gather_paged_kv", _gather, _fake_gather),
    ("linear", _linear, _fake_linear),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    register_fake(f"paged_kv::{_name}", _fake, lib=_LIBRARY)
