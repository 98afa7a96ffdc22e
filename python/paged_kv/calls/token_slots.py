"""The arithmetic of page tables: lengths, the tokens that rows stand for, and the page and slot of each.

Written once for NumPy arrays and torch tensors. Nothing here reads a value, so nothing is refused: a row without a slot
in its table gets page -1, which append skips. Letters in shapes: B requests, N rows.
"""

from __future__ import annotations

from typing import Any

from paged_kv.arrays.types import namespace


def lengths_of(num_pages: Any, last_page_len: Any, page_size: int) -> Any:
    """`[B]`, tokens of each request: 0 for one without pages."""
    xp = namespace(num_pages)
    return xp.where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)


def dense_num_pages(page_table: Any) -> Any:
    """`[B]`, pages of each request of a dense table: a row ends at its first -1."""
    return (page_table != -1).cumprod(1).sum(1)


def last_tokens(offsets: Any, lengths: Any, num_rows: int) -> tuple[Any, Any]:
    """Request and position of rows that are the last tokens of their requests, `[num_rows]` each.

    Rows `[offsets[b], offsets[b + 1])` are request b's. Batch -1 and position 0 where a row is none, or stands before
    the request's first token.
    """
    xp = namespace(offsets)
    rows = xp.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    if not len(lengths):
        return xp.full_like(rows, -1), xp.zeros_like(rows)
    request = xp.searchsorted(offsets[1:], rows, side="right")
    known_request = request.clip(max=len(lengths) - 1)
    position = rows - offsets[known_request + 1] + lengths[known_request]
    known = (request < len(lengths)) & (rows >= offsets[0]) & (position >= 0)
    return xp.where(known, request, -1), xp.where(known, position, 0)


def token_slots(
    starts: Any, num_pages: Any, entries: Any, batch: Any, positions: Any, page_size: int
) -> tuple[Any, Any]:
    """The page and the slot that each of N rows is written to, `[N]` each.

    Page -1 and slot 0 where a row names no request of the table, or a token outside its pages.

    Args:
        starts: `[B]`, where each request's pages begin in `entries`.
        num_pages: `[B]`, pages of each request; those of request b lie in `entries` from `starts[b]` on.
        entries: Page ids.
        batch, positions: `[N]`, the request and the position of each row.
        page_size: Tokens of a page.
    """
    xp = namespace(positions)
    if not len(starts) or not len(entries):
        return xp.full_like(positions, -1), xp.zeros_like(positions)
    # Products with a mask cost less than `where` with a scalar.
    known = (batch >= 0) & (batch < len(starts))
    request = batch * known
    column = positions // page_size
    known &= (column >= 0) & (column < num_pages[request])
    page = entries[(starts[request] + column) * known]
    return xp.where(known, page, -1), (positions - column * page_size) * known
