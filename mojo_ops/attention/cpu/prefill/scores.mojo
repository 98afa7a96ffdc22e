"""The scores of a prefill step on all CPUs: 16 queries at a time, one in each SIMD lane."""

from ....isa.convert import FloatVector
from ....isa.memory import FloatPointer
from ...logits import Logits, nan_where_infinite
from ...softmax import MINUS_INFINITY
from ..kv_tile import KVTile
from ..workspace import HeadLayout
from .queries import PrefillQueries, QUERY_COLUMNS


@no_inline
def mask_scores[
    has_masks: Bool
](
    queries: PrefillQueries,
    m: Int,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    tile: KVTile,
    word: Int,
    begin: Int,
    end: Int,
    scores: FloatPointer,
):
    """Turns the dot products of 16 queries into base-2 scores, or leaves them where a score is `logits.factor()` times
    the dot product; where a query does not see the token, the score is -inf.

    Parameters:
        has_masks: Whether the queries' `seen` says what they see, else `first` and `last`.

    Args:
        queries: The queries of the segment.
        m: The first of the 16.
        logits: The options of the call.
        heads: The head sizes.
        head: The KV head.
        tile: The KV tile.
        word: Its number in the step; where there are masks, its word of `seen`.
        begin: The first entry of the tile whose dot products are turned.
        end: The entry after the last one.
        scores: `[KV_TILE_TOKENS, 16]`, replaced from `begin` to `end`.
    """
    var slopes = FloatVector(0)
    if logits.has_alibi:
        for lane in range(QUERY_COLUMNS):
            slopes[lane] = logits.alibi_slopes[unsafe_offset=head * heads.group + (m + lane) % heads.group]
    var tokens = tile.tokens()
    var factor = logits.factor()
    var unseen = MINUS_INFINITY if factor >= 0 else -MINUS_INFINITY
    for t in range(begin, end):
        var at = scores.unsafe_offset(t * QUERY_COLUMNS)
        var token = SIMD[DType.int32, QUERY_COLUMNS](tokens[t])
        var dots = nan_where_infinite(at.unsafe_load[width=QUERY_COLUMNS](0))
        var seen = SIMD[DType.bool, QUERY_COLUMNS](fill=t < tile.count)
        comptime if has_masks:
            seen &= (queries.seen_words(m, word) >> UInt32(t) & 1).eq(1)
            token += Int32(queries.token_offset)
        else:
            seen &= token.lt(queries.last.unsafe_load[width=QUERY_COLUMNS](m))
            seen &= token.ge(queries.first.unsafe_load[width=QUERY_COLUMNS](m))
        var score = dots if factor != 0 else logits.score_each(dots, slopes, token.cast[DType.float32]())
        at.unsafe_store(0, seen.select(score, unseen))
