"""Trees of candidate tokens: several continuations of a request in one step, for speculative decoding.

A request brings rows that form a tree: each has a parent among them, or follows the last cached token. They are
appended in row order, so that row `i` fills slot `cache_length + i`, while its position in the text is
`cache_length + depth`. A row sees all cached tokens, its ancestors and itself. What is kept afterwards is a path from
the root: `move_tokens` makes its slots contiguous, and the next step's `cache_lengths` leave the others out, so that
they are written again.

Shapes below use `R` rows, `B` requests, `N` moves, `Hq` query heads and `D` = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.graphs import ops as paged
from paged_kv.graphs.checks import check_tensor, check_value
from paged_kv.graphs.paged_cache import PagedCache

MOVE_TOKENS = "paged_kv_move_tokens"
TREE_ROWS = "paged_kv_tree_rows"

LARGEST_TREE = 64
"""Rows of a request's tree at most, where the caller says nothing."""


@dataclass(frozen=True)
class TreeRows:
    """The rows of one step for attention and append, shared by all layers with one window."""

    batch: TensorValue
    """`[R]` int32: the row's request; -1 for padding."""
    slots: TensorValue
    """`[R]` int32: the token of its request that the row is appended as."""
    positions: TensorValue
    """`[R]` int32: its position in the text, for the rotation of q and k."""
    lengths: TensorValue
    """`[R]` int32: the tokens of its request up to itself, seen or not."""
    mask: TensorValue
    """`[R * bytes]` uint8: a row's bits are its request's rows."""
    mask_starts: TensorValue
    """`[R]` int64: a row's first bit; -1 where it sees every row of its request up to itself."""
    mask_firsts: TensorValue
    """`[R]` int32: the cached tokens, which no mask hides."""
    window_left: int

    @staticmethod
    def of(
        parents: TensorValue,
        row_offsets: TensorValue,
        cache_lengths: TensorValue,
        *,
        window_left: int = -1,
        largest_tree: int = LARGEST_TREE,
    ) -> TreeRows:
        """The rows of one step.

        Args:
            parents: `[R]` int32: the row's parent by its number among the rows of its request, which is less than its
                own; -1 where it follows the last cached token. Several rows may: a request can bring several trees.
            row_offsets: `[B + 1]` uint32: request `b` has rows `[row_offsets[b], row_offsets[b + 1])`.
            cache_lengths: `[B]` uint32: tokens that each request has in the cache.
            window_left: The window of the layers that these rows are for: a row sees the `window_left` positions before
                its own; -1 for all.
            largest_tree: Rows that a request with branches may have. Requests without branches, such as prompts, may
                have any number: their rows need no mask.

        When the graph runs, another parent and a larger tree are errors (`ValueError`). On a GPU, which refuses
        nothing, such a parent counts as -1, and such a row is padding.

        Raises:
            ContractTypeError, ShapeError, ContractError: an argument is no tensor of that dtype and rank, or they lie
                on two devices; `window_left` or `largest_tree` is no integer, below -1 or below 1.
        """
        window_left = integer("window_left", window_left, -1, LARGEST_INDEX)
        mask_bytes = -(-integer("largest_tree", largest_tree, 1) // 8)
        check_tensor("parents", parents)
        device = parents.device
        check_value("parents", parents, DType.int32, [None], device)
        for name, value in (("row_offsets", row_offsets), ("cache_lengths", cache_lengths)):
            check_value(name, value, DType.uint32, [None], device)
        rows = parents.shape[0]
        number = TensorType(DType.int32, [rows], device)
        results = ops.custom(
            TREE_ROWS,
            device=device,
            values=[
                parents,
                row_offsets,
                cache_lengths,
                ops.constant(window_left, DType.int32, DeviceRef.CPU()),
            ],
            out_types=[
                number,
                number,
                number,
                TensorType(DType.uint8, [rows, mask_bytes], device),
                TensorType(DType.int64, [rows], device),
                number,
            ],
        )
        batch, slots, positions, mask, starts, firsts = (result.tensor for result in results)
        lengths, _ = paged.lengths_and_last_rows(slots, row_offsets, cache_lengths.shape[0])
        return TreeRows(batch, slots, positions, lengths, ops.reshape(mask, [-1]), starts, firsts, window_left)


def tree_attention(
    cache: PagedCache,
    q: TensorValue,
    rows: TreeRows,
    *,
    layer: int = 0,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: TensorValue | None = None,
    o_dtype: DType | None = None,
) -> tuple[TensorValue, TensorValue]:
    """Attention of the rows of trees, whose K and V have been appended to `rows.slots`.

    Row `r` of `q` `[R, Hq, D]` sees the cached tokens of its request, its ancestors and itself, as far as the window of
    `rows` goes. q and k must be rotated by `rows.positions` before: rotation and ALiBi inside attention go by slots,
    which are not the positions of a tree's rows. The options are those of `ops.attention`.

    Returns:
        o `[R, Hq, D]` in `o_dtype`, q's where None, and the base-2 lse `[R, Hq]` float32.
    """
    return paged.masked_attention(
        cache,
        q,
        rows.batch,
        rows.lengths,
        row_positions=rows.positions,
        mask=rows.mask,
        mask_starts=rows.mask_starts,
        mask_firsts=rows.mask_firsts,
        layer=layer,
        sm_scale=sm_scale,
        window_left=rows.window_left,
        logits_soft_cap=logits_soft_cap,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        o_dtype=o_dtype,
    )


def move_tokens(cache: PagedCache, batch_indices: TensorValue, sources: TensorValue, targets: TensorValue) -> None:
    """Token `sources[i]` of request `batch_indices[i]` becomes its token `targets[i]` (each `[N]` int32), in place.

    K, V and every layer. The moves of a request are in ascending order of both, and none goes forward
    (`targets[i] <= sources[i]`), so that each reads what was there before the call; a move of request -1 is skipped. A
    path of a tree is kept so: its m-th row, row `i` of the tree, moves from `cache_length + i` to `cache_length + m`.

    When the graph runs, another order, a token outside the request's pages, a page outside the pool, and two requests
    that meet in a slot are errors (`ValueError`), and nothing is written. On a GPU, which refuses nothing, a move of a
    token without a slot is skipped, and the moves are carried out in their order.
    """
    cache.check("batch_indices", batch_indices, DType.int32, [None])
    cache.check("sources", sources, DType.int32, [batch_indices.shape[0]])
    cache.check("targets", targets, DType.int32, [batch_indices.shape[0]])
    ops.inplace_custom(
        MOVE_TOKENS,
        device=cache.device,
        values=[batch_indices, sources, targets, *cache.operands(0)],
        parameters={"kv_layout": cache.kv_layout},
    )
