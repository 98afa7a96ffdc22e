"""Appending to a paged KV cache, in place, and the arithmetic of page tables: FlashInfer's `page` module on any arrays.

Letters in shapes: B requests, N new tokens, Hk KV heads, D head dimension. Arrays are NumPy, torch, JAX, MAX or
anything with DLPack on the CPU, or torch and MAX arrays on one GPU; indices are int32, or int64 and uint32 where every
value fits. A cache is one array, NHD `[pages, 2, page_size, Hk, D]` or HND `[pages, 2, Hk, page_size, D]`, or a tuple
`(k, v)` of such arrays without the 2; its last stride is 1, the others are free. Everything is checked before anything
is written, so an error leaves all arrays as they were. No two slots of a cache may share memory; rows and
indices that lie in the cache itself count as they were before the call.

Rows and a cache on a GPU have their index arrays on the host, checked as ever, or all of them on that GPU. Reading them
there would wait for the device, so only types and shapes are checked: a row without a slot in the table is skipped, and
of two rows for one slot the last wins. Results of index arithmetic over arrays on a GPU lie there.

A page table comes in one of two kinds:

* CSR: request b owns the pages `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`; `kv_last_page_len[b]`, from 1 to
  page_size, counts the tokens in its last page, those of this append included.
* dense: request b owns the pages `page_table[b]`, up to the first -1; `last_page_len[b]`, from 0 to page_size, counts
  the tokens in its last page before the append.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer, one_of
from paged_kv.arrays import devices
from paged_kv.arrays.pages import check_layout
from paged_kv.arrays.types import ArrayDevice, ArrayT, CacheArrays, SupportsDLPack
from paged_kv.calls.append import WritableCache, slots_after_last, slots_at, slots_numbered, slots_of_last
from paged_kv.calls.offsets import MAX_ROWS, check_count, check_offsets, checked_last_tokens, last_tokens, offsets_of
from paged_kv.calls.table import KV_NAMES, Table
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError
from paged_kv.manager import PagedKVCacheManager

__all__ = [
    "PagedKVCacheManager",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "reshape_and_cache_flash",
]


@overload
def append_paged_kv_cache(
    append_key: SupportsDLPack,
    append_value: SupportsDLPack,
    batch_indices: SupportsDLPack,
    positions: SupportsDLPack,
    paged_kv_cache: CacheArrays,
    kv_indices: SupportsDLPack,
    kv_indptr: SupportsDLPack,
    kv_last_page_len: SupportsDLPack,
    kv_layout: str = "NHD",
) -> None: ...
@overload
def append_paged_kv_cache(
    append_key: SupportsDLPack,
    append_value: SupportsDLPack,
    append_indptr: SupportsDLPack,
    kv_data: CacheArrays,
    kv_indices: SupportsDLPack,
    kv_indptr: SupportsDLPack,
    kv_last_page_len: SupportsDLPack,
    kv_layout: str = "NHD",
) -> None: ...
@overload
def append_paged_kv_cache(
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_cache: CacheArrays,
    page_table: SupportsDLPack,
    last_page_len: SupportsDLPack,
    page_size: int,
    kv_layout: str = "NHD",
) -> None: ...
def append_paged_kv_cache(*args: Any, **kwargs: Any) -> None:
    """Writes new K and V rows to their slots in the pages, in place.

    Three signatures, told apart by how many arguments there are besides `kv_layout`, and by their names:

    1. `(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
       kv_layout="NHD")`, FlashInfer's of today: row i becomes token `positions[i]` of request `batch_indices[i]`,
       both `[N]`; a row of batch -1 is skipped.
    2. `(append_key, append_value, append_indptr, kv_data, kv_indices, kv_indptr, kv_last_page_len, kv_layout="NHD")`,
       FlashInfer's until 0.2: rows `append_indptr[b]` to `append_indptr[b + 1]`, `[B + 1]`, become the last tokens of
       request b.
    3. `(k, v, kv_cache, page_table, last_page_len, page_size, kv_layout="NHD")`, with a dense page table `[B, n]`:
       one row a request, `N = B`, written to slot `last_page_len[b]` of its last page.

    Keys and values are `[N, Hk, D]` in the cache's dtype, or floats for a cache of int8 or uint8, and are then
    quantised: such a head has the bytes of D int8 or int4 codes and a scale (docs/quantised-cache.md). The pages must
    have been allocated. Page ids are checked in the whole table, a position against the pages of its request.

    Raises:
        ContractTypeError: no such signature; an argument is no array, of a wrong dtype, or not on the others' device.
        ShapeError: shapes do not fit each other.
        PageTableError: the table is inconsistent, a page id is outside the cache, a position is outside its request's
            pages, or two rows go to one slot.
        ContractError: the cache cannot be written in place, two of its elements share memory, or `kv_layout` is
            unknown.

    Examples:
        >>> import numpy as np
        >>> cache = np.zeros((8, 2, 4, 2, 8), np.float32)  # pages, K and V, slots, KV heads, head_dim
        >>> indptr, pages, last = np.array([0, 2], np.int32), np.array([6, 3], np.int32), np.array([2], np.int32)
        >>> k, v = np.ones((1, 2, 8), np.float32), np.full((1, 2, 8), 2, np.float32)
        >>> append_paged_kv_cache(k, v, np.array([0], np.int32), np.array([5], np.int32), cache, pages, indptr, last)
        >>> cache[3, :, 1, 0, 0].tolist()  # token 5 is slot 1 of the second page
        [1.0, 2.0]
    """
    _choose("append_paged_kv_cache", args, kwargs, _APPEND)


def reshape_and_cache_flash(
    key: SupportsDLPack,
    value: SupportsDLPack,
    key_cache: SupportsDLPack,
    value_cache: SupportsDLPack,
    slot_mapping: SupportsDLPack,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Writes new K and V rows to numbered slots in place: vLLM's append of this name.

    Args:
        key, value: `[N, Hk, D]` in the cache's dtype, or floats for a cache of codes, as `append_paged_kv_cache` takes
            them. Only the first rows count where `slot_mapping` has fewer than N entries.
        key_cache, value_cache: `[pages, page_size, Hk, D]`.
        slot_mapping: Row i goes to page `slot_mapping[i] // page_size`, slot `slot_mapping[i] % page_size`; or is
            skipped where it is -1.
        kv_cache_dtype: "auto": rows are stored as they are.
        k_scale, v_scale: Accepted, without effect: they belong to other values of `kv_cache_dtype`.

    Raises: as `append_paged_kv_cache`; a `PageTableError` where a slot is none of the cache's, or two rows have one.
    """
    del k_scale, v_scale
    one_of("kv_cache_dtype", kv_cache_dtype, ("auto",))
    cache = WritableCache.pair(key_cache, value_cache, key=key, value=value)
    k, v = cache.rows(key, value, ("key", "value"))
    slots = slots_numbered(cache.pages, slot_mapping)
    count = len(slots.pages)
    if len(k) < count:
        raise ShapeError(f"slot_mapping: expected at most key's {len(k)} entries, got {count}")
    cache.write((k[:count], v[:count]), slots)


@overload
def append_paged_mla_kv_cache(
    append_ckv: SupportsDLPack,
    append_kpe: SupportsDLPack,
    batch_indices: SupportsDLPack,
    positions: SupportsDLPack,
    ckv_cache: SupportsDLPack,
    kpe_cache: SupportsDLPack,
    kv_indices: SupportsDLPack,
    kv_indptr: SupportsDLPack,
    kv_last_page_len: SupportsDLPack,
) -> None: ...
@overload
def append_paged_mla_kv_cache(
    k: SupportsDLPack,
    v: SupportsDLPack,
    mla_kv_cache: SupportsDLPack,
    page_table: SupportsDLPack,
    last_page_len: SupportsDLPack,
    page_size: int,
) -> None: ...
def append_paged_mla_kv_cache(*args: Any, **kwargs: Any) -> None:
    """Writes new rows of a latent-attention (MLA) cache to their slots in the pages, in place.

    Two signatures, told apart as those of `append_paged_kv_cache`:

    1. `(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
       kv_last_page_len)`, FlashInfer's: `append_ckv` `[N, Dc]` and `append_kpe` `[N, Dp]` go to `ckv_cache`
       `[pages, page_size, Dc]` and `kpe_cache` `[pages, page_size, Dp]`; FlashInfer's 512 and 64 are two widths of any.
    2. `(k, v, mla_kv_cache, page_table, last_page_len, page_size)`: one cache for both, `[pages, page_size, Hk, W]` for
       k `[B, Hk, Dk]` and v `[B, Hk, Dv]`, or `[pages, page_size, W]` for `[B, Dk]` and `[B, Dv]`, with
       `W = Dk + Dv`: k fills the first Dk elements of a slot, v the others.

    Raises: as `append_paged_kv_cache`.
    """
    _choose("append_paged_mla_kv_cache", args, kwargs, _APPEND_MLA)


@overload
def get_batch_indices_positions(append_indptr: ArrayT, seq_lens: SupportsDLPack, nnz: int) -> tuple[ArrayT, ArrayT]: ...
@overload
def get_batch_indices_positions(
    page_table: ArrayT, last_page_len: SupportsDLPack, page_size: int
) -> tuple[ArrayT, ArrayT]: ...
def get_batch_indices_positions(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The request and the position of each token, `[nnz]` twice: what `append_paged_kv_cache` takes.

    Two signatures, told apart by their names, else by the rank of the first argument:

    1. `(append_indptr, seq_lens, nnz)`, FlashInfer's: rows `append_indptr[b]` to `append_indptr[b + 1]`, `[B + 1]`, are
       the last of the `seq_lens[b]` tokens, `[B]`, of request b. Rows from `append_indptr[B]` to nnz are padding: batch
       -1, position 0.
    2. `(page_table, last_page_len, page_size)`, with a dense page table `[B, n]`: every token that the pages hold,
       request after request; nnz is the sum of `get_seq_lens`. On the host alone, as only the values tell nnz.

    On a GPU, rows before the first token of their request are padding too. nnz is at most 2^25 in either case.

    Returns arrays of the kind of the first argument, int64 where it is int64, else int32.

    Raises:
        ContractTypeError, ShapeError: as `append_paged_kv_cache`.
        PageTableError: offsets that do not start at 0, decrease or exceed `nnz`; a request that appends more tokens
            than it has; a dense table of over 2^25 tokens.
        ContractError: `nnz` is negative or over 2^25.
    """
    result: tuple[Any, Any] = _choose("get_batch_indices_positions", args, kwargs, _BATCH_INDICES_POSITIONS)
    return result


@overload
def get_seq_lens(kv_indptr: ArrayT, kv_last_page_len: SupportsDLPack, page_size: int) -> ArrayT: ...
@overload
def get_seq_lens(page_table: ArrayT, last_page_len: SupportsDLPack, page_size: int) -> ArrayT: ...
def get_seq_lens(*args: Any, **kwargs: Any) -> Any:
    """Tokens of each request, `[B]`: `(pages - 1) * page_size + last_page_len`, 0 for a request without pages.

    Two signatures, told apart by their names, else by the rank of the first argument: FlashInfer's
    `(kv_indptr, kv_last_page_len, page_size)`, and `(page_table, last_page_len, page_size)` with a dense page table.
    Returns an array of the kind of the first argument, int64 where it is int64, else int32.

    Raises: as `get_batch_indices_positions`.
    """
    return _choose("get_seq_lens", args, kwargs, _SEQ_LENS)


@dataclass(frozen=True)
class _Signature:
    """One of the signatures of a function: the names of its arguments in order, and what it calls."""

    call: Callable[..., Any]
    names: tuple[str, ...]
    takes_layout: bool = False
    """True if `kv_layout` may follow."""

    def fits(self, num_positional: int, keywords: frozenset[str], has_layout: bool) -> bool:
        """Return whether a call gives exactly these arguments; `num_positional` and `keywords` leave `kv_layout`
        out.
        """
        return (
            num_positional + len(keywords) == len(self.names)
            and keywords == frozenset(self.names[num_positional:])
            and has_layout <= self.takes_layout
        )


def _choose(function: str, args: tuple[Any, ...], kwargs: dict[str, Any], signatures: tuple[_Signature, ...]) -> Any:
    """Calls the signature that a call's arguments fit: by their number and names, else by the first one's rank.

    Raises:
        ContractTypeError: they fit none.
    """
    layout_by_position = bool(args) and isinstance(args[-1], str)
    has_layout = layout_by_position or "kv_layout" in kwargs
    keywords = frozenset(kwargs) - {"kv_layout"}
    fitting = [s for s in signatures if s.fits(len(args) - layout_by_position, keywords, has_layout)]
    if len(fitting) > 1:  # the second of two signatures has the dense page table
        device = devices.device_of(page_table=args[0])
        fitting = [fitting[device.view(args[0], "page_table").ndim == 2]]
    if not fitting:
        arguments = [f"{len(args)} positional", *kwargs]
        legal = "; ".join(f"({', '.join([*s.names, *['kv_layout'] * s.takes_layout])})" for s in signatures)
        raise ContractTypeError(
            f"{function}: its arguments ({', '.join(arguments)}) fit none of its signatures: {legal}"
        )
    return fitting[0].call(*args, **kwargs)


def _append_at(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    check_layout(kv_layout)
    arguments = {"append_key": append_key, "append_value": append_value}
    cache = WritableCache.paged(paged_kv_cache, kv_layout, "paged_kv_cache", **arguments)
    rows = cache.rows(append_key, append_value, ("append_key", "append_value"))
    at = {"batch_indices": batch_indices, "positions": positions}
    table = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
    cache.write(rows, slots_at(cache.pages, len(rows[0]), **at, **table))


def _append_last(
    append_key: Any,
    append_value: Any,
    append_indptr: Any,
    kv_data: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    check_layout(kv_layout)
    cache = WritableCache.paged(kv_data, kv_layout, "kv_data", append_key=append_key, append_value=append_value)
    rows = cache.rows(append_key, append_value, ("append_key", "append_value"))
    table = kv_indptr, kv_indices, kv_last_page_len
    cache.write(rows, slots_of_last(cache.pages, len(rows[0]), append_indptr, *table))


def _append_dense(
    k: Any, v: Any, kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int, kv_layout: str = "NHD"
) -> None:
    check_layout(kv_layout)
    cache = WritableCache.paged(kv_cache, kv_layout, "kv_cache", k=k, v=v)
    _append_one_each(k, v, cache, page_table, last_page_len, page_size)


def _append_mla_at(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> None:
    cache = WritableCache.latent_pair(ckv_cache, kpe_cache, append_ckv=append_ckv, append_kpe=append_kpe)
    rows = cache.rows(append_ckv, append_kpe, ("append_ckv", "append_kpe"), num_axes=2)
    at = {"batch_indices": batch_indices, "positions": positions}
    table = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
    cache.write(rows, slots_at(cache.pages, len(rows[0]), **at, **table))


def _append_mla_dense(k: Any, v: Any, mla_kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int) -> None:
    cache, num_axes = WritableCache.latent(mla_kv_cache, k, v)
    _append_one_each(k, v, cache, page_table, last_page_len, page_size, num_axes)


def _append_one_each(
    k: Any, v: Any, cache: WritableCache, page_table: Any, last_page_len: Any, page_size: int, num_axes: int = 3
) -> None:
    """One row a request, to the slot after its last token."""
    size = integer("page_size", page_size, 1, LARGEST_INDEX)
    if size != cache.pages.page_size:
        raise ShapeError(f"page_size: expected {cache.pages.name}'s {cache.pages.page_size}, got {size}")
    rows = cache.rows(k, v, ("k", "v"), num_axes)
    cache.write(rows, slots_after_last(cache.pages, page_table, last_page_len, len(rows[0])))


def _positions_of_rows(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    nnz, names = integer("nnz", nnz, 0, MAX_ROWS), ("append_indptr", "seq_lens")
    device = devices.device_of(append_indptr=append_indptr, seq_lens=seq_lens)
    offsets, lengths = device.indices(append_indptr, names[0]), device.indices(seq_lens, names[1])
    if device.readable:
        check_offsets(offsets, names[0], len(lengths))
        if nnz < offsets[-1]:
            raise PageTableError(f"append_indptr: expected an end of at most nnz = {nnz}, got {offsets[-1]}")
        batch, positions = checked_last_tokens(offsets, lengths, nnz, names)
    else:
        check_count(offsets, lengths, names)
        batch, positions = last_tokens(offsets, lengths, nnz)
    return like_index(device, append_indptr, batch), like_index(device, append_indptr, positions)


def _positions_dense(page_table: Any, last_page_len: Any, page_size: int) -> tuple[Any, Any]:
    device = devices.device_of(page_table=page_table, last_page_len=last_page_len)
    if not device.readable:
        raise devices.unreadable("page_table", "how many tokens it holds would have to be read back")
    lengths = Table.dense(page_table, last_page_len, page_size).lengths
    offsets = offsets_of(lengths)
    if offsets[-1] > MAX_ROWS:
        raise PageTableError(f"page_table: expected at most {MAX_ROWS} tokens, got {offsets[-1]}")
    batch, positions = last_tokens(offsets.astype(np.int32), lengths, int(offsets[-1]))
    return like_index(device, page_table, batch), like_index(device, page_table, positions)


def _lengths_csr(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    device = devices.device_of(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    return like_index(device, kv_indptr, Table.csr_lengths(kv_indptr, kv_last_page_len, page_size, KV_NAMES, device))


def _lengths_dense(page_table: Any, last_page_len: Any, page_size: int) -> Any:
    device = devices.device_of(page_table=page_table, last_page_len=last_page_len)
    return like_index(device, page_table, Table.dense(page_table, last_page_len, page_size, device=device).lengths)


def like_index(device: ArrayDevice, array: Any, indices: Any) -> Any:
    """Indices as an array of the kind of `array`, int64 where that is int64, else int32."""
    wide = device.dtype(device.view(array, "array")) == np.int64
    return device.like(array, device.astype(indices, np.int64 if wide else np.int32))


_CSR = ("kv_indices", "kv_indptr", "kv_last_page_len")
_DENSE = ("page_table", "last_page_len", "page_size")

_APPEND = (
    _Signature(
        _append_at,
        ("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", *_CSR),
        takes_layout=True,
    ),
    _Signature(_append_last, ("append_key", "append_value", "append_indptr", "kv_data", *_CSR), takes_layout=True),
    _Signature(_append_dense, ("k", "v", "kv_cache", *_DENSE), takes_layout=True),
)
_APPEND_MLA = (
    _Signature(
        _append_mla_at, ("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache", *_CSR)
    ),
    _Signature(_append_mla_dense, ("k", "v", "mla_kv_cache", *_DENSE)),
)
_BATCH_INDICES_POSITIONS = (
    _Signature(_positions_of_rows, ("append_indptr", "seq_lens", "nnz")),
    _Signature(_positions_dense, _DENSE),
)
_SEQ_LENS = (
    _Signature(_lengths_csr, ("kv_indptr", "kv_last_page_len", "page_size")),
    _Signature(_lengths_dense, _DENSE),
)
