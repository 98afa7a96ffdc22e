"""Page tables in a GPU's memory: the arithmetic of `paged_kv.calls.page_table`, over torch tensors there.

Nothing here reads the device's memory, so nothing can be refused: a row without a place in its table gets page -1,
which append skips. Letters in shapes: B requests, N new tokens. Index tensors are int64.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paged_kv.arrays.gpu import Tensor, numpy_dtype, to_tensor
from paged_kv.errors import ContractTypeError, ShapeError


def indices_of(array: Any, name: str, ndim: int = 1) -> Tensor:
    """An index array on a GPU as int64; the values of uint32 are read as int32, which has -1.

    Raises:
        ContractTypeError: its elements are no integers.
        ShapeError: its rank is not `ndim`.
    """
    torch = import_module("torch")
    tensor = to_tensor(array, name)
    if numpy_dtype(tensor, name).kind not in "iu":
        raise ContractTypeError(f"{name}: dtype must be an integer, not {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimensions, its shape is {tuple(tensor.shape)}")
    return (tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor).long()


def csr_lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """`[B]`, tokens of each request: 0 for one without pages."""
    torch = import_module("torch")
    pages = indptr[1:] - indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)


def dense_pages(page_table: Tensor) -> Tensor:
    """`[B]`, pages of each request: a row ends at its first -1."""
    return (page_table != -1).long().cumprod(1).sum(1)


def dense_lengths(page_table: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """`[B]`, tokens of each request: 0 for one without pages."""
    torch = import_module("torch")
    pages = dense_pages(page_table)
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)


def last_tokens(offsets: Tensor, lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Request and position of rows that are the last tokens of their requests, `[num_rows]` each.

    Rows `[offsets[b], offsets[b + 1])` are request b's. Batch -1 and position 0 where a row is none, or stands before
    the request's first token.
    """
    torch = import_module("torch")
    rows = torch.arange(num_rows, device=offsets.device)
    if not len(lengths):
        return torch.full_like(rows, -1), torch.zeros_like(rows)
    request = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    safe = request.clamp(max=len(lengths) - 1)
    position = rows - offsets[safe + 1] + lengths[safe]
    known = (request < len(lengths)) & (rows >= offsets[0]) & (position >= 0)
    return torch.where(known, request, -1), torch.where(known, position, 0)


def csr_slots(
    indptr: Tensor, indices: Tensor, batch: Tensor, positions: Tensor, page_size: int, num_pages: int
) -> tuple[Tensor, Tensor]:
    """The page and the slot that each of N rows is written to, `[N]` int32 each.

    Page -1 where a row names no request of the table, or a token outside its pages, or where the page is not one of
    the pool's.
    """
    torch = import_module("torch")
    if len(indptr) < 2 or not len(indices):
        return _nowhere(batch)
    known = (batch >= 0) & (batch < len(indptr) - 1) & (positions >= 0)
    safe = torch.where(known, batch, 0)
    at = indptr[safe] + torch.where(known, positions, 0) // page_size
    known &= (at >= 0) & (at < indptr[safe + 1]) & (at < len(indices))
    return _placed(indices[torch.where(known, at, 0)], positions, known, page_size, num_pages)


def dense_slots(page_table: Tensor, positions: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor]:
    """As `csr_slots`, of one row a request: `positions` is `[B]`, the table `[B, max_pages]`."""
    torch = import_module("torch")
    if not page_table.numel():
        return _nowhere(positions)
    column = positions // page_size
    known = (positions >= 0) & (column < dense_pages(page_table))
    page = page_table.gather(1, torch.where(known, column, 0)[:, None])[:, 0]
    return _placed(page, positions, known, page_size, num_pages)


def _placed(page: Tensor, positions: Tensor, known: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor]:
    torch = import_module("torch")
    known = known & (page >= 0) & (page < num_pages)
    return torch.where(known, page, -1).int(), torch.where(known, positions % page_size, 0).int()


def _nowhere(rows: Tensor) -> tuple[Tensor, Tensor]:
    torch = import_module("torch")
    return torch.full_like(rows, -1).int(), torch.zeros_like(rows).int()
