"""Offsets of ragged rows: request b has the rows `offsets[b]` to `offsets[b + 1]`, of `[B + 1]` that begin at 0.

The arithmetic is written once for NumPy arrays and torch tensors. Letters in shapes: B requests, N rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arrays.types import namespace
from paged_kv.errors import PageTableError, ShapeError

Indices = npt.NDArray[np.int32]

MAX_ROWS = 2**25
"""Rows that batch indices and positions are made for at most: some 1.5 GiB of memory, well past any step's tokens."""


def offsets_of(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The offsets `[B + 1]` of `counts [B]` rows."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def check_offsets(offsets: Indices, name: str, batch_size: int | None = None) -> None:
    """Refuses offsets `[B + 1]` that do not start at 0, decrease, or are not of `batch_size` requests.

    Raises:
        ShapeError, PageTableError: as said; the message calls them `name`.
    """
    if not len(offsets) or (batch_size is not None and len(offsets) != batch_size + 1):
        expected = "B + 1" if batch_size is None else f"B + 1 = {batch_size + 1}"
        raise ShapeError(f"{name}: expected {expected} entries, got {len(offsets)}")
    if offsets[0] != 0:
        raise PageTableError(f"{name}[0]: expected 0, got {offsets[0]}")
    decreases = offsets[1:] < offsets[:-1]  # a difference could overflow
    if decreases.any():
        b = int(decreases.argmax())
        raise PageTableError(f"{name} decreases at request {b}: from {offsets[b]} to {offsets[b + 1]}")


def check_count(offsets: Any, per_request: Any, names: tuple[str, str]) -> None:
    """Refuses offsets `[B + 1]` that are not of as many requests as an array `[B]` has entries.

    Raises:
        ShapeError: as said.
    """
    if len(offsets) != len(per_request) + 1:
        expected = f"B + 1 = {len(per_request) + 1} entries, as {names[1]} has {len(per_request)}"
        raise ShapeError(f"{names[0]}: expected {expected}, got {len(offsets)}")


def last_tokens(offsets: Any, lengths: Any, num_rows: int) -> tuple[Any, Any]:
    """Request and position of rows that are the last tokens of their requests, `[num_rows]` each.

    No value is read, so nothing is refused: batch -1 and position 0 where a row is none of a request's, or stands
    before the request's first token.
    """
    xp = namespace(offsets)
    rows = xp.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    if not len(lengths):
        return xp.full_like(rows, -1), xp.zeros_like(rows)
    request = xp.searchsorted(offsets[1:], rows, side="right")
    clipped = request.clip(max=len(lengths) - 1)
    position = rows - offsets[clipped + 1] + lengths[clipped]
    has_token = (request < len(lengths)) & (rows >= offsets[0]) & (position >= 0)
    return xp.where(has_token, request, -1), xp.where(has_token, position, 0)


def checked_last_tokens(
    offsets: Indices, lengths: Indices, num_rows: int, names: tuple[str, str]
) -> tuple[Indices, Indices]:
    """`last_tokens` of offsets on the host that were checked.

    Raises:
        PageTableError: a request has more rows than tokens; messages call offsets and lengths `names`.
    """
    counts = np.diff(offsets)
    short = counts > lengths
    if short.any():
        b = int(short.argmax())
        raise PageTableError(f"{names[0]}: request {b} appends {counts[b]} tokens, {names[1]} says {lengths[b]}")
    batch, positions = last_tokens(offsets, lengths, num_rows)
    return batch.astype(np.int32, copy=False), positions.astype(np.int32, copy=False)
