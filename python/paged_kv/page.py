"""Appending to a paged KV cache, in place, and the arithmetic of page tables: FlashInfer's `page` module on any arrays.

Letters in shapes: B requests, N new tokens, Hk KV heads, D head dimension. Arrays are NumPy, torch, JAX, MAX or
anything with DLPack on the CPU, or torch and MAX arrays on one GPU; indices are int32, or int64 and uint32 where every
value fits. A cache is one array, NHD `[pages, 2, page_size, Hk, D]` or HND `[pages, 2, Hk, page_size, D]`, or a tuple
`(k, v)` of such arrays without the 2; its last stride is 1, the others are free. Everything is checked before anything
is written, so an error leaves all arrays as they were.

Rows and a cache on a GPU have their index arrays on the host, checked as ever, or all of them on that GPU, where
reading them would mean to wait, and only types and shapes are checked: a row without a place in the table is skipped,
and of two rows for one slot the last wins. Results of index arithmetic over arrays on a GPU lie there.

A page table comes in one of two forms:

* CSR: request b owns the pages `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`; `kv_last_page_len[b]`, from 1 to
  page_size, counts the tokens in its last page, those of this append included.
* dense: request b owns the pages `page_table[b]`, up to the first -1; `last_page_len[b]`, from 0 to page_size, counts
  the tokens in its last page before the append.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import as_numpy
from paged_kv.calls import append_forms as forms
from paged_kv.errors import ContractTypeError
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
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None: ...
@overload
def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    append_indptr: Any,
    kv_data: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None: ...
@overload
def append_paged_kv_cache(
    k: Any, v: Any, kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int, kv_layout: str = "NHD"
) -> None: ...
def append_paged_kv_cache(*args: Any, **kwargs: Any) -> None:
    """Writes new K and V rows to their slots in the pages, in place.

    Three forms, told apart by how many arguments there are besides `kv_layout`, and by their names:

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
        ContractTypeError: no such form; an argument is no array, of a wrong dtype, or on another device than others.
        ShapeError: shapes do not fit each other.
        PageTableError: the table is inconsistent, a page id is outside the cache, a position is outside its request's
            pages, or two rows go to one slot.
        ContractError: the cache cannot be written in place, or `kv_layout` is unknown.
    """
    _choose("append_paged_kv_cache", args, kwargs, forms.append_at, forms.append_last, forms.append_dense)(
        *args, **kwargs
    )


@overload
def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> None: ...
@overload
def append_paged_mla_kv_cache(
    k: Any, v: Any, mla_kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int
) -> None: ...
def append_paged_mla_kv_cache(*args: Any, **kwargs: Any) -> None:
    """Writes new rows of a latent-attention (MLA) cache to their slots in the pages, in place.

    Two forms, told apart as those of `append_paged_kv_cache`:

    1. `(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
       kv_last_page_len)`, FlashInfer's: `append_ckv` `[N, Dc]` and `append_kpe` `[N, Dp]` go to `ckv_cache`
       `[pages, page_size, Dc]` and `kpe_cache` `[pages, page_size, Dp]`; FlashInfer's 512 and 64 are two widths of any.
    2. `(k, v, mla_kv_cache, page_table, last_page_len, page_size)`: one cache for both, `[pages, page_size, Hk, W]` for
       k `[B, Hk, Dk]` and v `[B, Hk, Dv]`, or `[pages, page_size, W]` for `[B, Dk]` and `[B, Dv]`, with
       `W = Dk + Dv`: k fills the first Dk elements of a slot, v the others.

    Raises: as `append_paged_kv_cache`.
    """
    _choose("append_paged_mla_kv_cache", args, kwargs, forms.append_mla_at, forms.append_mla_dense)(*args, **kwargs)


@overload
def get_batch_indices_positions(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]: ...
@overload
def get_batch_indices_positions(page_table: Any, last_page_len: Any, page_size: int) -> tuple[Any, Any]: ...
def get_batch_indices_positions(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The request and the position of each token, `[nnz]` twice: what `append_paged_kv_cache` takes.

    Two forms, told apart by their names, else by the rank of the first argument:

    1. `(append_indptr, seq_lens, nnz)`, FlashInfer's: rows `append_indptr[b]` to `append_indptr[b + 1]`, `[B + 1]`, are
       the last of the `seq_lens[b]` tokens, `[B]`, of request b. Rows from `append_indptr[B]` to nnz are padding: batch
       -1, position 0.
    2. `(page_table, last_page_len, page_size)`, with a dense page table `[B, n]`: every token that the pages hold,
       request after request; nnz is the sum of `get_seq_lens`. On the host alone, as only the values tell nnz.

    On a GPU, rows before the first token of their request are padding too.

    Returns arrays of the kind of the first argument, int64 where it is int64, else int32.

    Raises:
        ContractTypeError, ShapeError: as `append_paged_kv_cache`.
        PageTableError: offsets that do not start at 0, decrease or exceed `nnz`; a request that appends more tokens
            than it has.
    """
    form = _choose("get_batch_indices_positions", args, kwargs, forms.positions_of_rows, forms.positions_dense)
    return form(*args, **kwargs)


@overload
def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any: ...
@overload
def get_seq_lens(page_table: Any, last_page_len: Any, page_size: int) -> Any: ...
def get_seq_lens(*args: Any, **kwargs: Any) -> Any:
    """Tokens of each request, `[B]`: `(pages - 1) * page_size + last_page_len`, 0 for a request without pages.

    Two forms, told apart by their names, else by the rank of the first argument: FlashInfer's
    `(kv_indptr, kv_last_page_len, page_size)`, and `(page_table, last_page_len, page_size)` with a dense page table.
    Returns an array of the kind of the first argument, int64 where it is int64, else int32.

    Raises: as `get_batch_indices_positions`.
    """
    return _choose("get_seq_lens", args, kwargs, forms.lengths_csr, forms.lengths_dense)(*args, **kwargs)


def _choose(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *candidates: Callable[..., Any]
) -> Callable[..., Any]:
    """The form that is called: by the number of arguments without `kv_layout`, their names, the first one's rank."""
    layout = "kv_layout" in kwargs or bool(args and isinstance(args[-1], str))
    count = len(args) + len(kwargs) - layout
    fitting = []
    for form in candidates:
        names = form.__code__.co_varnames[: form.__code__.co_argcount]
        takes_layout = names[-1] == "kv_layout"
        if count == len(names) - takes_layout and layout <= takes_layout and kwargs.keys() <= set(names[len(args) :]):
            fitting.append(form)
    if len(fitting) > 1:  # get_seq_lens and get_batch_indices_positions, whose second form has the dense page table
        read: Any = as_numpy if places.device_index(args[0]) is None else gpu.to_tensor
        return fitting[read(args[0], "page_table").ndim == 2]
    if fitting:
        return fitting[0]
    given = [f"{len(args)} positional", *kwargs]
    known = "; ".join(f"({', '.join(f.__code__.co_varnames[: f.__code__.co_argcount])})" for f in candidates)
    raise ContractTypeError(f"{name}: its arguments ({', '.join(given)}) fit none of its forms: {known}")
