"""The working memory of prefill on matrix tiles (`prefill.mojo`)."""

from ....cache.pointers import untracked
from ....isa.amx_tiles import AMX_TILE_ELEMENTS
from ....isa.memory import Bf16BitsPointer, FloatPointer, align_to_line
from ..prefetch import IntPointer
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS, padded_queries
from ..prefill.step import PrefillStep, STEP_OFFSETS, STEP_TILES, STEP_TOKENS
from ..workspace import HeadLayout

comptime Bf16PairPointer = Pointer[UInt32, MutUntrackedOrigin]

comptime AMX_PREFILL_SPLIT_TOKENS = 1024
"""Tokens of a split on matrix tiles, whose products of 128 tokens take little longer than the merge of a split."""
comptime PREFILL_MIN_QUERIES = 64
"""Queries a KV head of a prefill block, at least."""
comptime PAIR_SCORE_FLOATS = 2 * STEP_TOKENS * QUERY_COLUMNS + 512
"""Memory for the scores of a pair of query tiles. It is no multiple of 4 KB, because a load waits for pending stores
whose addresses have the same low 12 bits."""
comptime NO_PAIR = -1
"""The pair before the first and after the last."""


struct PrefillWorkspace(Movable):
    """Working memory of one task for one KV head of a prefill block. Q is `padded_queries`, P and Pv the padded
    head_dim of keys and of V."""

    var memory: List[Float32]
    var offsets: List[Int]
    """The token offsets of `STEP_TILES` tiles."""
    var q: Bf16BitsPointer
    """`[Q / 16, P / 32, 16 pairs, 16, 2]`."""
    var keys: Bf16BitsPointer
    """`[STEP_TOKENS, P]`."""
    var values: Bf16BitsPointer
    """`[STEP_TILES, Pv / 16, 16 pairs of tokens, 16, 2]`."""
    var scores: FloatPointer
    """`[2, PAIR_SCORE_FLOATS]`, each `[2, STEP_TOKENS, 16]`: the scores of two pairs of query tiles, in turn."""
    var weights: Bf16BitsPointer
    """`[2, STEP_TILES, 2, 2, 16, 32]` bfloat16: the weights of two pairs, of each query tile the rounded weights and
    then what the rounding left."""
    var transpose_buffer: Bf16PairPointer
    """`[2, 16 pairs of tokens, 16]`: weights before they are transposed."""
    var queries: PrefillQueries

    def __init__(out self, queries: Int, heads: HeadLayout):
        var room = padded_queries(queries)
        var padded_dim = heads.padded_dim
        var q = room * padded_dim // 2
        var keys = STEP_TOKENS * padded_dim // 2
        var values = STEP_TOKENS * heads.padded_value // 2
        var scores = 2 * PAIR_SCORE_FLOATS
        var weights = 4 * STEP_TILES * AMX_TILE_ELEMENTS
        var transpose_buffer = 2 * 16 * QUERY_COLUMNS
        self.memory = List[Float32](
            unsafe_uninit_length=q
            + keys
            + values
            + scores
            + weights
            + transpose_buffer
            + PrefillQueries.num_floats(queries, heads.padded_value)
            + 16
        )
        self.offsets = List[Int](length=STEP_OFFSETS, fill=0)
        var at = align_to_line(untracked(self.memory.unsafe_ptr()))
        self.q = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(q)
        self.keys = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(keys)
        self.values = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(values)
        self.scores = at
        at = at.unsafe_offset(scores)
        self.weights = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(weights)
        self.transpose_buffer = at.unsafe_bitcast[UInt32]()
        at = at.unsafe_offset(transpose_buffer)
        self.queries = PrefillQueries(queries, heads.padded_value, at)

    def offset_buffer(self) -> IntPointer:
        """The offsets of a step."""
        return untracked(self.offsets.unsafe_ptr())


@always_inline
def visible_tiles(step: PrefillStep, pair: Int, queries: PrefillQueries) -> Int:
    """The number of tiles of a step up to the last token that a query of the pair sees; 0 for `NO_PAIR`."""
    return 0 if pair == NO_PAIR else step.tiles_before(queries.end_seen[2](pair * 2 * QUERY_COLUMNS))
