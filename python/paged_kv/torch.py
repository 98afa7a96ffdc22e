"""torch operators over paged caches on a CPU: they run eagerly, and inside `torch.compile(fullgraph=True)`.

    from paged_kv.torch import append_paged_kv, gather_paged_kv, linear, paged_attention

The functions call `torch.ops.paged_kv.*`, whose kernels are those of all other calls of this package. A cache is two
tensors, K and V `[pages, page_size, Hk, D]`, with any strides of which the last is 1: two views of one tensor, for one,
that holds both of all layers. A page table is `block_tables [B, n]`, int32, and `seq_lens [B]`, int32: the first
`ceil(seq_lens[b] / page_size)` entries of row b are request b's pages in token order, what follows may be anything.

A cache of int8 holds int8 codes with a scale a token and head, one of uint8 int4 codes: its last dimension is the bytes
of such a head, D + 4 or D / 2 + 4, of which q and the rows of an append and a gather have the D elements.

No operator has a derivative. A call with a tensor that requires a gradient is refused while torch records gradients:
call it under `torch.inference_mode()` or `torch.no_grad()`.

Letters in shapes: B requests, R query rows, N tokens, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from max.driver import Buffer
from torch import Tensor
from torch.library import Library, register_fake

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.cache_storage import cache_operands, overlapping_pages, paged_views
from paged_kv.arrays.dtypes import CACHE_DTYPES, dtype_of
from paged_kv.arrays.exchange import to_max, to_torch
from paged_kv.arrays.host import HOST, as_indices, as_numpy, to_buffer
from paged_kv.calls.append import WritableCache
from paged_kv.calls.attend import Attention, Scales, checked_sinks
from paged_kv.calls.block_tables import block_entries, checked_lengths, lookup_table_of
from paged_kv.calls.kv_copy import read_rows, write_rows
from paged_kv.calls.linear import Weight
from paged_kv.calls.page_table import Indices, PageTable, check_offsets
from paged_kv.calls.plan import AttentionPlan, check_dtype
from paged_kv.calls.ragged import RaggedRequests
from paged_kv.calls.results import Results
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.options import (
    FORMATS,
    AttentionOptions,
    KVFormat,
    check_number,
    stored_dtype,
    stored_elements,
    stored_head,
)

__all__ = ["append_paged_kv", "gather_paged_kv", "linear", "paged_attention"]

_MOST_KEPT = 1 << 16
"""Entries of a page table that are copied to be compared with the next call's."""
_MOST_LAYOUTS = 64
"""Of caches that one attention knows; with more it forgets them."""
_NO_SCALES: Scales = (None, None, None)
Made = TypeVar("Made")


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of query rows over the pages of their requests: decode, or causal prefill of ragged rows.

    Args:
        q: `[R, Hq, D]` float32, bfloat16 or float16.
        k_cache, v_cache: `[pages, page_size, Hk, D]` in q's dtype, float8, or codes.
        block_tables: `[B, n]`.
        seq_lens: `[B]`, tokens of each request, its new ones included.
        qo_indptr: `[B + 1]` int32: rows `qo_indptr[b]` to `qo_indptr[b + 1]` of q are request b's last tokens, each of
            which sees the tokens up to itself. None: one row a request, R = B.
        sm_scale: Multiplies q . k; `1 / sqrt(D)` where None.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; 0 is off.
        sinks: `[Hq]` natural-log logits that join the denominator, and the lse.
        alibi: Whether ALiBi's slopes are added to the scores.

    Returns:
        o `[R, Hq, D]` in q's dtype, and the base-2 lse `[R, Hq]` float32: 0 and -inf for a row that sees no token.

    Raises:
        ContractTypeError: a tensor has another dtype or device, or requires a gradient.
        ShapeError: a rank, shape, head count or head_dim does not fit.
        PageTableError: a page id is not one of the cache's; a length or an offset is out of range.
        ContractError: a number is out of range.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
        _check_tensors_or_none(qo_indptr=qo_indptr, sinks=sinks)
        if sm_scale is not None:
            check_number("sm_scale", sm_scale)
        check_number("logits_soft_cap", logits_soft_cap)
        window_left, alibi = integer("window_left", window_left, -1, LARGEST_INDEX), flag("alibi", alibi)
    return torch.ops.paged_kv.paged_attention(
        q, k_cache, v_cache, block_tables, seq_lens, qo_indptr, sm_scale, window_left, logits_soft_cap, sinks, alibi
    )


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
) -> None:
    """Writes N tokens into their pages, in place.

    Args:
        k, v: `[N, Hk, D]` in the cache's dtype, or floats for a cache of codes, which are quantised: row i is token
            `positions[i]` of request `batch_indices[i]`.
        k_cache, v_cache: `[pages, page_size, Hk, D]`, of which no two elements share memory.
        block_tables: `[B, n]`; a row ends at its first -1.
        batch_indices, positions: `[N]` int32; a row of request -1 is skipped.

    Raises:
        ContractTypeError, ShapeError: as `paged_attention`.
        PageTableError: a position is outside its request's pages, a page id is not one of the cache's, or two rows are
            for one slot. Nothing was written, as with every error.
        ContractError: K and V of the cache share memory.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        _check_tensors(block_tables=block_tables, batch_indices=batch_indices, positions=positions)
    torch.ops.paged_kv.append_paged_kv(k, v, k_cache, v_cache, block_tables, batch_indices, positions)


def gather_paged_kv(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """The tokens of every request, out of their pages: k and v `[num_tokens, Hk, D]`, request after request, in the
    cache's dtype, or of codes the numbers that they stand for, float32.

    Args:
        k_cache, v_cache: `[pages, page_size, Hk, D]`.
        block_tables: `[B, n]`.
        seq_lens: `[B]`, tokens of each request.
        num_tokens: Their sum: the shape of the result, which `torch.compile` has to know.

    Raises:
        ContractTypeError, PageTableError: as `paged_attention`.
        ShapeError: also where `num_tokens` is another number.
    """
    if not torch.compiler.is_compiling():
        _check_tensors(k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
        num_tokens = integer("num_tokens", num_tokens, 0, LARGEST_INDEX)
    return torch.ops.paged_kv.gather_paged_kv(k_cache, v_cache, block_tables, seq_lens, num_tokens)


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
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens,"
    " Tensor? qo_indptr, float? sm_scale, SymInt window_left, float logits_soft_cap, Tensor? sinks, bool alibi)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "append_paged_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_tables,"
    " Tensor batch_indices, Tensor positions) -> ()"
)
_LIBRARY.define(
    "gather_paged_kv(Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, SymInt num_tokens)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define("linear(Tensor x, Tensor w) -> Tensor")


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    alibi: bool,
) -> tuple[Tensor, Tensor]:
    _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    _check_ranks(q, k_cache, v_cache)
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    attention = planned(
        (q.shape[1], num_kv_heads, head_dim, page_size),
        (q.dtype, k_cache.dtype),
        (sm_scale, window_left, logits_soft_cap, alibi),
    )
    rows = _rows.of((page_size,), block_tables=block_tables, seq_lens=seq_lens, qo_indptr=qo_indptr)
    return attention.over_tensors(rows, q, k_cache, v_cache, sinks)


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
) -> None:
    _refuse_gradients(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _check_caches(k_cache=k_cache, v_cache=v_cache)
    cache = WritableCache.paged((k_cache, v_cache), "NHD", "cache", k=k, v=v)
    rows = cache.rows(k, v, ("k", "v"))
    sizes = len(rows[0]), cache.page_size, cache.num_pages
    cache.write(rows, _slots.of(sizes, block_tables=block_tables, batch_indices=batch_indices, positions=positions))


def _gather(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    _refuse_gradients(k_cache=k_cache, v_cache=v_cache)
    _check_caches(k_cache=k_cache, v_cache=v_cache)
    k, v = paged_views((k_cache, v_cache), "NHD", "cache")
    rows = _rows.of((k.shape[1],), block_tables=block_tables, seq_lens=seq_lens, qo_indptr=None)
    rows.table.check(len(k))
    found = int(rows.lengths.sum(dtype=np.int64))
    if found != integer("num_tokens", num_tokens, 0):
        raise ShapeError(f"num_tokens is {num_tokens}, the requests have {found} (seq_lens)")
    tokens = read_rows(HOST, k, v, rows.table.entries, rows.lengths, FORMATS.get(HOST.dtype(k).name))
    return HOST.like(k_cache, tokens[0]), HOST.like(v_cache, tokens[1])


def _linear(x: Tensor, w: Tensor) -> Tensor:
    _refuse_gradients(x=x, w=w)
    found: Tensor = Weight(w).apply(x)
    return found


class TensorAttention(Attention):
    """An `Attention` of torch's tensors on the CPU, which keeps no cache alive."""

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan, keeps_storage=False)
        self._passed: dict[tuple[Any, ...], tuple[int, int, Buffer]] = {}

    def over_tensors(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`over_pages` of K and V `[pages, page_size, Hk, D]`, without scales: o and the lse.

        What dtypes, shapes and strides decide is checked in their first call; from then on a call checks what else may
        change: values, storage, the number of rows.
        """
        layout = q.dtype, q.shape[1:], k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride()
        passed = self._passed.get(layout)
        fits = rows.count == q.shape[0] > 0 and rows.table.page_size == k.shape[1]
        if (
            passed is not None
            and fits
            and rows.is_plain(self.plan.options.window_left >= 0, self.plan.pos_encoding_mode)
            and _holds(queries := q.contiguous(), queries.numel())
            and _holds(k, passed[0])
            and _holds(v, passed[1])
        ):
            k_extent, v_extent, view = passed
            rows.table.check(k.shape[0])
            values = None
            if sinks is not None:
                values = to_buffer(checked_sinks(HOST, sinks, self.plan.num_qo_heads, "num_qo_heads"))
            storage = to_max(_flat(k, k_extent)), to_max(_flat(v, v_extent)), view
            o, lse = self.run_checked(rows, to_max(queries), storage, values)
            return to_torch(o), to_torch(lse)
        results = Results(return_lse=True)
        found: tuple[Tensor, Tensor] = self.over_pages(rows, q, (k, v), "NHD", _NO_SCALES, results, sinks=sinks)
        if passed is None and q.numel() and k.numel() and v.numel():
            if len(self._passed) >= _MOST_LAYOUTS:
                self._passed = {}
            _, _, view = cache_operands(*paged_views((k, v), "NHD"))
            self._passed[layout] = _extent(k), _extent(v), view
        return found

    def over_codes(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """O over codes of tokens that lie side by side, K and V `[N, Hk, bytes]`: `rows.table` has pages that begin at
        every token, as `over_tokens` takes them of floats. The plan is one of pages, of any size.
        """
        page_size = rows.table.page_size
        pages = overlapping_pages(as_numpy(k, "k"), page_size), overlapping_pages(as_numpy(v, "v"), page_size)
        found: Tensor = self.over_views(rows, HOST, q, pages, _NO_SCALES, Results(), sinks=sinks)
        return found


def quantised(kv_format: KVFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V `[N, Hk, D]` of floats as a cache of codes holds them, `[N, Hk, bytes]`; for `paged_kv.transformers`."""
    count, heads, head_dim = k.shape
    shape = (count, 1, heads, stored_head(kv_format, head_dim))  # a page of one slot for each token
    dtype = getattr(torch, stored_dtype(kv_format))
    k_codes, v_codes = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    views = as_numpy(k_codes, "k"), as_numpy(v_codes, "v")
    pages = np.arange(count, dtype=np.int32)
    write_rows(HOST, as_numpy(k, "k"), as_numpy(v, "v"), *views, pages, np.zeros_like(pages))
    return k_codes[:, 0], v_codes[:, 0]


def widened(kv_format: KVFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What codes of K and V `[N, Hk, bytes]` stand for, `[N, Hk, D]` float32; for `paged_kv.transformers`."""
    table, lengths = np.arange(len(k), dtype=np.uint32)[None], np.array([len(k)], np.int32)
    keys, values = read_rows(HOST, as_numpy(k[:, None], "k"), as_numpy(v[:, None], "v"), table, lengths, kv_format)
    return torch.from_numpy(keys), torch.from_numpy(values)


def _extent(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: Tensor, extent: int) -> Tensor:
    return tensor.as_strided((extent,), (1,))


def _holds(tensor: Tensor, extent: int) -> bool:
    """Whether a tensor is an ordinary one, whose memory lies on the CPU, is aligned and has `extent` elements."""
    size = tensor.itemsize
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not tensor.is_neg()
        and tensor.data_ptr() % size == 0
        and (tensor.storage_offset() + extent) * size <= tensor.untyped_storage().nbytes()
    )


@lru_cache(maxsize=256)
def planned(
    sizes: tuple[int, int, int, int | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    options: tuple[float | None, int, float, bool],
) -> TensorAttention:
    """The plan of these query heads, KV heads, last dimension of the cache and page_size, with its operands prepared;
    for `paged_kv.transformers` too.
    """
    sm_scale, window_left, logits_soft_cap, alibi = options
    q_dtype, kv_dtype = (dtype_of(dtype, name) for dtype, name in zip(dtypes, _DTYPE_NAMES, strict=True))
    kv_format = FORMATS.get(kv_dtype.name)
    if kv_format is not None:
        kv_dtype = CACHE_DTYPES[kv_format]
        sizes = (*sizes[:2], stored_elements(kv_format, sizes[2]), sizes[3])
    check_dtype(f"{_DTYPE_NAMES[0]}:", q_dtype)
    return TensorAttention(
        AttentionPlan(
            *sizes,
            q_dtype,
            kv_dtype,
            "ALIBI" if alibi else "NONE",
            AttentionOptions(sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap),
            dtype_names=_DTYPE_NAMES,
            cache_name="cache",
        )
    )


class _Kept(Generic[Made]):
    """What was made of a call's indices, checked, for the next call: nothing of it is the caller's memory.

    The layers of a model are called with the same indices: what the last call made is kept, with a copy of what it was
    made of.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._last: tuple[Any, Made | None] = (), None  # read and replaced as one value, by any number of threads

    def of(self, sizes: tuple[int, ...], **indices: Tensor | None) -> Made:
        """`make(*sizes, **indices)`, kept; the last of `indices` may be None."""
        arrays = [as_numpy(tensor, name) for name, tensor in indices.items() if tensor is not None]
        if sum(array.size for array in arrays) > _MOST_KEPT:
            return self._make(*sizes, **indices)
        key = (sizes, *((array.shape, array.dtype, array.tobytes()) for array in arrays))
        kept, made = self._last
        if made is None or key != kept:
            made = self._make(*sizes, **indices)
            self._last = key, made
        return made


def _new_rows(page_size: int, block_tables: Tensor, seq_lens: Tensor, qo_indptr: Tensor | None) -> Rows:
    """The rows of a call of attention, or the requests of a gather."""
    batch = as_numpy(seq_lens, "seq_lens").size
    lengths = checked_lengths(seq_lens, batch, LARGEST_INDEX)
    table = lookup_table_of(block_entries(block_tables, batch), lengths, page_size)
    if qo_indptr is None:
        return Rows(table, np.arange(batch, dtype=np.int32), lengths.copy())
    offsets = as_indices(qo_indptr, "qo_indptr").copy()
    check_offsets(offsets, "qo_indptr", batch)
    return RaggedRequests(offsets, lengths.copy(), table, None, True).rows


def _new_slots(
    num_rows: int, page_size: int, num_pages: int, block_tables: Tensor, batch_indices: Tensor, positions: Tensor
) -> tuple[Indices, Indices]:
    """The page and the slot of each row of an append, `[N]` int32 each."""
    entries = block_entries(block_tables, block_tables.shape[0] if block_tables.dim() else 0)
    table = PageTable.from_dense(entries, np.full(len(entries), page_size, np.int32), page_size)
    requests, at = as_indices(batch_indices, "batch_indices"), as_indices(positions, "positions")
    for indices, name in ((requests, "batch_indices"), (at, "positions")):
        if len(indices) != num_rows:
            raise ShapeError(f"{name} has {len(indices)} entries, there are {num_rows} rows to append")
    return table.slots(requests, at, num_pages)


def _check_tensors(**tensors: Any) -> None:
    """Refuses what torch itself would refuse in words of its own, or compute on another device.

    Raises:
        ContractTypeError: an argument is no tensor, or none of plain memory on the CPU.
    """
    for name, tensor in tensors.items():
        if type(tensor) is Tensor and _is_plain(tensor):
            continue
        if not isinstance(tensor, Tensor):
            raise ContractTypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
        if not _is_plain(tensor):
            kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ContractTypeError(
                f"{name} is a {kind} tensor on {tensor.device}: it must be a strided one on the CPU"
            )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _check_tensors_or_none(**tensors: Any) -> None:
    _check_tensors(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


def _refuse_gradients(**tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ContractTypeError(
                f"{name} requires a gradient, and paged_kv's operators compute none: call them under"
                " torch.inference_mode() or torch.no_grad()"
            )


def _check_ranks(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """What the shapes of the results follow from, eagerly and in a fake call."""
    for name, tensor, rank in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if tensor.dim() != rank:
            raise ShapeError(f"{name} must have {rank} dimensions, its shape is {tuple(tensor.shape)}")


def _check_caches(**caches: Tensor) -> None:
    """Each is an array of rank 4, by the name that the caller knows."""
    for name, cache in caches.items():
        if as_numpy(cache, name).ndim != 4:
            raise ShapeError(f"{name} must have 4 dimensions, its shape is {tuple(cache.shape)}")


def _fake_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    alibi: bool,
) -> tuple[Tensor, Tensor]:
    del block_tables, seq_lens, qo_indptr, sm_scale, window_left, logits_soft_cap, alibi
    _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    _check_ranks(q, k_cache, v_cache)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: object) -> None:
    del rest
    _refuse_gradients(k=k, v=v, k_cache=k_cache, v_cache=v_cache)


def _fake_gather(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    del block_tables, seq_lens
    _refuse_gradients(k_cache=k_cache, v_cache=v_cache)
    found = []
    for cache in (k_cache, v_cache):
        kv_format = FORMATS.get(str(cache.dtype).removeprefix("torch."))
        shape = (num_tokens, cache.shape[2], stored_elements(kv_format or "", cache.shape[3]))
        found.append(cache.new_empty(shape, dtype=torch.float32 if kv_format else cache.dtype))
    return found[0], found[1]


def _fake_linear(x: Tensor, w: Tensor) -> Tensor:
    _refuse_gradients(x=x, w=w)
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dim() != 2:
            raise ShapeError(f"{name} must have 2 dimensions, its shape is {tuple(tensor.shape)}")
    return x.new_empty((x.shape[0], w.shape[0]))


_DTYPE_NAMES = ("q", "cache")
_rows = _Kept(_new_rows)
_slots = _Kept(_new_slots)

for _name, _kernel, _fake in (
    ("paged_attention", _attention, _fake_attention),
    ("append_paged_kv", _append, _fake_append),
    ("gather_paged_kv", _gather, _fake_gather),
    ("linear", _linear, _fake_linear),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    register_fake(f"paged_kv::{_name}", _fake, lib=_LIBRARY)
