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

A page table comes in one of two forms:

* CSR: request b owns the pages `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`; `kv_last_page_len[b]`, from 1 to
  page_size, counts the tokens in its last page, those of this append included.
* dense: request b owns the pages `page_table[b]`, up to the first -1; `last_page_len[b]`, from 0 to page_size, counts
  the tokens in its last page before the append.
"""

from __future__ import annotations

from typing import Any, overload

from paged_kv.arrays.types import ArrayT, PagedCache, SupportsDLPack
from paged_kv.calls import page_calls
from paged_kv.manager import PagedKVCacheManager

__all__ = [
    "PagedKVCacheManager",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


@overload
def append_paged_kv_cache(
    append_key: SupportsDLPack,
    append_value: SupportsDLPack,
    batch_indices: SupportsDLPack,
    positions: SupportsDLPack,
    paged_kv_cache: PagedCache,
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
    kv_data: PagedCache,
    kv_indices: SupportsDLPack,
    kv_indptr: SupportsDLPack,
    kv_last_page_len: SupportsDLPack,
    kv_layout: str = "NHD",
) -> None: ...
@overload
def append_paged_kv_cache(
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_cache: PagedCache,
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

    Keys and values are `[N, Hk, D]` in the cache's dtype. The pages must have been allocated. Page ids are checked in
    the whole table, a position against the pages of its request.

    Raises:
        ContractTypeError: no such signature; an argument is no array, of a wrong dtype, or not on the others' device.
        ShapeError: shapes do not fit each other.
        PageTableError: the table is inconsistent, a page id is outside the cache, a position is outside its request's
            pages, or two rows go to one slot.
        ContractError: the cache cannot be written in place, two of its elements share memory, or `kv_layout` is
            unknown.
    """
    page_calls.choose("append_paged_kv_cache", args, kwargs, page_calls.APPEND)


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
    page_calls.choose("append_paged_mla_kv_cache", args, kwargs, page_calls.APPEND_MLA)


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

    On a GPU, rows before the first token of their request are padding too. nnz is at most 2^25 in either form.

    Returns arrays of the kind of the first argument, int64 where it is int64, else int32.

    Raises:
        ContractTypeError, ShapeError: as `append_paged_kv_cache`.
        PageTableError: offsets that do not start at 0, decrease or exceed `nnz`; a request that appends more tokens
            than it has; a dense table of over 2^25 tokens.
        ContractError: `nnz` is negative or over 2^25.
    """
    found: tuple[Any, Any] = page_calls.choose(
        "get_batch_indices_positions", args, kwargs, page_calls.BATCH_INDICES_POSITIONS
    )
    return found


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
    return page_calls.choose("get_seq_lens", args, kwargs, page_calls.SEQ_LENS)
