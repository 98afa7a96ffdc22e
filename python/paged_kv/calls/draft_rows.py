"""The rows of requests that bring several new tokens each: drafts that a model verifies.

Letters in shapes: B requests, R rows. Row i of a request's c stands at position `lengths[b] - c + i`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.calls.offsets import Indices, check_offsets, offsets_of
from paged_kv.calls.rows import RowMasks, Rows, check_new_tokens
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ContractTypeError, ShapeError


def draft_counts(num_rows: int, q_len_per_req: Any, max_q_len: Any, cum_seq_lens_q: Any) -> tuple[Indices, int]:
    """The rows of each request, `[B]`, and B.

    Args:
        num_rows: R.
        q_len_per_req: Rows of each request, where `cum_seq_lens_q` is None.
        max_q_len: At least the most of a request, or None.
        cum_seq_lens_q: Offsets `[B + 1]` of the requests' rows, or None.

    Raises:
        ContractTypeError, ShapeError, PageTableError: they are no offsets of R rows.
        ContractError: a number is out of range, or missing.
    """
    if cum_seq_lens_q is not None:
        devices.require_host(cum_seq_lens_q, "cum_seq_lens_q", "a call's rows are counted on the host")
        offsets = as_indices(cum_seq_lens_q, "cum_seq_lens_q")
        check_offsets(offsets, "cum_seq_lens_q")
        if offsets[-1] != num_rows:
            raise ShapeError(f"cum_seq_lens_q: expected an end at query's {num_rows} rows, got {offsets[-1]}")
        counts = np.diff(offsets)
    else:
        if q_len_per_req is None:
            raise ContractError("q_len_per_req: expected an integer where cum_seq_lens_q is None, got None")
        number = integer("q_len_per_req", q_len_per_req, 1, LARGEST_INDEX)
        if num_rows % number:
            raise ShapeError(f"query: expected a multiple of q_len_per_req = {number} rows, got {num_rows}")
        counts = np.full(num_rows // number, number, np.int32)
    most = int(counts.max(initial=0))
    if max_q_len is not None and integer("max_q_len", max_q_len, 0, LARGEST_INDEX) < most:
        raise ContractError(
            f"max_q_len: expected at least {most}, the rows of request {int(counts.argmax())}, got {max_q_len}"
        )
    return counts, len(counts)


def draft_rows(table: Table, counts: Indices, mask: Any) -> Rows:
    """The last `counts[b]` tokens of each request as rows.

    Args:
        table: The pages and tokens of each request, the new ones included.
        counts: `[B]` rows.
        mask: None, where each row sees the tokens up to itself; or which of its request's new tokens a row sees, in
            bits: `[B, c, words]` uint16 where all counts are c, or `[R, words]`.

    Raises:
        PageTableError: as `check_new_tokens`.
        ContractTypeError, ShapeError: the mask is no array of this dtype and shape on the host.
    """
    lengths = table.lengths
    check_new_tokens(lengths, counts)
    batch = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.maximum(lengths - counts, 0)[batch]  # [R], the new tokens' first position
    within = np.arange(len(batch)) - offsets_of(counts)[batch]
    seen = np.where(lengths[batch] > 0, firsts + within + 1, 0).astype(np.int32)
    if mask is None:
        return Rows(table, batch, seen)
    words = _mask_words(mask, counts, len(batch))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    new = np.arange(bits.shape[1])
    own = new < counts[batch][:, None]
    if (((new <= within[:, None]) == bits.astype(bool)) | ~own).all():
        return Rows(table, batch, seen)
    starts = np.arange(len(batch), dtype=np.int64) * bits.shape[1]
    masks = RowMasks(words.view(np.uint8).reshape(-1), starts, firsts)
    return Rows(table, batch, lengths[batch], np.maximum(seen - 1, 0), masks=masks)


def _mask_words(mask: Any, counts: Indices, num_rows: int) -> np.ndarray:
    """The mask as `[R, words]` uint16, copied."""
    devices.require_host(mask, "mask", "it is compared with the causal one")
    view = as_numpy(mask, "mask")
    if view.dtype != np.uint16:
        raise ContractTypeError(f"mask: expected dtype uint16, got {view.dtype}")
    words = 2 * -(-int(counts.max(initial=0)) // 32)
    even = len(counts) > 0 and bool((counts == counts[0]).all())
    shapes = [(num_rows, words), *([(len(counts), int(counts[0]), words)] if even else [])]
    if view.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(f"mask: expected shape {expected}, words of each row, got {list(view.shape)}")
    return view.reshape(num_rows, words).copy()
