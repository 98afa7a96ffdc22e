"""Trees of candidate tokens for speculative decoding: masks and positions for the prefill wrappers, and what is kept.

A request brings rows that form a tree: each row is a candidate token, and its parent is an earlier row of the request
or, as -1, the last cached token. The rows are appended in their order, so that row i lies in slot
`cache_length + i`, while its position in the text is `cache_length + depth`. Graphs have `graphs.trees` for this.

Letters in shapes: B requests, R rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import LARGEST_INDEX, integer, shown
from paged_kv.arrays import devices
from paged_kv.arrays.types import ArrayDevice, ArrayT, SupportsDLPack
from paged_kv.calls.offsets import check_count, check_offsets
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

Indices = npt.NDArray[np.int32]
_NAMES = ("qo_indptr", "cache_lengths")


def tree_mask(
    parents: ArrayT, qo_indptr: SupportsDLPack, cache_lengths: SupportsDLPack, *, window_left: int = -1
) -> ArrayT:
    """The `custom_mask` of trees for `BatchPrefillWithPagedKVCacheWrapper.plan`.

    A row sees the cached tokens of its request, its ancestors and itself. Plan without `window_left`, which counts back
    from a row's slot: give it here, where it counts positions.

    Args:
        parents: `[R]`, any integers: the parent of each row, by its number among the rows of its request; -1 where it
            follows the last cached token.
        qo_indptr: `[B + 1]`: request b brings rows `qo_indptr[b]` to `qo_indptr[b + 1]`, the last is R.
        cache_lengths: `[B]`: tokens that each request has in the cache, those of the tree excluded.
        window_left: A row sees this many positions before its own; -1 for all.

    Returns:
        Bool, `[sum of n_b * (cache_lengths[b] + n_b)]` for requests of n_b rows: request after request, row after row.
        It is of the kind of `parents`.

    Raises:
        ContractTypeError: an argument is no array of integers, or lies on a GPU, where it would have to be read.
        ShapeError: `qo_indptr` is not `[B + 1]`, or does not end at R.
        PageTableError: offsets that do not start at 0 or decrease, a negative length, a parent that is neither -1 nor
            an earlier row of its request.
        ContractError: `window_left` is below -1, or the mask has over 2^31 - 1 entries.
    """
    window_left = integer("window_left", window_left, -1, LARGEST_INDEX)
    device, rows, offsets, cached = _checked(parents, qo_indptr, cache_lengths)
    counts = (offsets[1:] - offsets[:-1]).astype(np.int64)
    size = int((counts * (cached + counts)).sum())
    if size > LARGEST_INDEX:
        raise ContractError(f"the mask of these trees has {size} entries, over 2^31 - 1")
    mask = np.zeros(size, bool)
    begin = 0
    for b, (count, length) in enumerate(zip(counts, cached.astype(np.int64), strict=True)):
        of_request = mask[begin : begin + count * (length + count)].reshape(count, length + count)
        begin += of_request.size
        tree = rows[offsets[b] : offsets[b + 1]]
        depths = _depths(tree)
        for i, parent in enumerate(tree):
            if parent >= 0:
                of_request[i] = of_request[parent]
            else:
                of_request[i, :length] = True
            of_request[i, length + i] = True
        if window_left >= 0:
            for i, first in enumerate(np.clip(length + depths - window_left, 0, length)):
                of_request[i, :first] = False
            of_request[:, length:] &= depths >= depths[:, None] - window_left
    return device.like(parents, mask)


def tree_positions(parents: ArrayT, qo_indptr: SupportsDLPack, cache_lengths: SupportsDLPack) -> ArrayT:
    """The position in the text of each row of trees, `[R]` int32: cached tokens and ancestors before it.

    By it q and k are rotated; the slot of a row is another number (`get_batch_indices_positions`). Arguments and errors
    are those of `tree_mask`.
    """
    device, rows, offsets, cached = _checked(parents, qo_indptr, cache_lengths)
    trees = [_depths(rows[first:end]) for first, end in pairwise(offsets)]
    depths = np.concatenate([np.zeros(0, np.int64), *trees])
    return device.like(parents, (depths + np.repeat(cached, np.diff(offsets))).astype(np.int32))


def accepted_rows(parents: Sequence[int], tokens: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The rows of one request's tree that its model confirms, from the root on: those to keep in the cache.

    Row 0 is the token that was sampled last, and is always kept; of the children of a kept row, the one whose token the
    model samples after that row is kept too. The new tokens are those of the kept rows after row 0, then
    `sampled[rows[-1]]`: as many as there are kept rows.

    Args:
        parents: The parent of each row, -1 for row 0 alone.
        tokens: The token of each row.
        sampled: What the model samples after each row.

    Raises:
        ContractTypeError: an argument is no sequence of integers.
        ShapeError: the three have different lengths, or none.
        PageTableError: `parents[0]` is not -1, or another parent is no earlier row.

    Examples:
        >>> accepted_rows([-1, 0, 0, 2], tokens=[5, 6, 7, 8], sampled=[7, 1, 8, 2])
        [0, 2, 3]
    """
    parents, tokens, sampled = (
        _integers(name, given) for name, given in (("parents", parents), ("tokens", tokens), ("sampled", sampled))
    )
    if not len(parents) == len(tokens) == len(sampled) > 0:
        raise ShapeError(
            f"parents, tokens and sampled must have one length of at least 1, not {len(parents)}, {len(tokens)} and"
            f" {len(sampled)}"
        )
    for i, parent in enumerate(parents):
        if parent != -1 if i == 0 else not 0 <= parent < i:
            wanted = "-1" if i == 0 else "an earlier row"
            raise PageTableError(f"parents: row {i} has parent {parent}, expected {wanted}")
    rows = [0]
    for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent == rows[-1] and token == sampled[parent]:
            rows.append(i)
    return rows


def _integers(name: str, given: Any) -> list[int]:
    """The integers of a list, a tuple or an array."""
    try:
        if isinstance(given, str | bytes | dict | set):
            raise TypeError
        return [operator.index(entry) for entry in given]
    except Exception as error:  # an object's own methods may raise anything
        raise ContractTypeError(f"{name} must be a sequence of integers, not {shown(given)}") from error


def _checked(
    parents: object, qo_indptr: object, cache_lengths: object
) -> tuple[ArrayDevice, Indices, Indices, Indices]:
    """The device of the arrays, and all three as checked integers."""
    device = devices.device_of(parents=parents, qo_indptr=qo_indptr, cache_lengths=cache_lengths)
    if not device.readable:
        raise devices.unreadable("parents", "the mask of a tree is made on the host")
    rows = device.indices(parents, "parents")
    offsets, cached = device.indices(qo_indptr, _NAMES[0]), device.indices(cache_lengths, _NAMES[1])
    check_offsets(offsets, _NAMES[0], len(cached))
    check_count(offsets, cached, _NAMES)
    if offsets[-1] != len(rows):
        raise ShapeError(f"qo_indptr ends at {offsets[-1]}, parents has {len(rows)} entries")
    if (cached < 0).any():
        b = int((cached < 0).argmax())
        raise PageTableError(f"cache_lengths: request {b} has {cached[b]} tokens")
    first = np.repeat(offsets[:-1], np.diff(offsets))
    wrong = (rows < -1) | (rows >= np.arange(len(rows)) - first)
    if wrong.any():
        r = int(wrong.argmax())
        b = int(np.searchsorted(offsets[1:], r, side="right"))
        raise PageTableError(
            f"parents: row {r - first[r]} of request {b} has parent {rows[r]}, expected -1 or an earlier row"
        )
    return device, rows, offsets, cached


def _depths(parents: Indices) -> npt.NDArray[np.int64]:
    """The ancestors of each row of one request, `[n]`."""
    depths = np.zeros(len(parents), np.int64)
    for i, parent in enumerate(parents):
        if parent >= 0:
            depths[i] = depths[parent] + 1
    return depths
