"""The working memory of prefill on matrix tiles (`prefill.mojo`), and the tokens of one of its steps."""

from std.math import ceildiv

from ....cache.paged_kv_cache import PagedKVCache
from ....cache.pointers import untracked
from ....isa.amx_tiles import AMX_TILE_ELEMENTS
from ....isa.memory import Bf16BitsPointer, FloatPointer, align_to_line
from ...softmax import AttentionState
from ..kv_tile import KVTile, OFFSET_WIDTH
from ..prefetch import IntPointer, KV_TILE_TOKENS
from ..workspace import RunningStates

comptime Int32Pointer = Pointer[Int32, MutUntrackedOrigin]
comptime Bf16PairPointer = Pointer[UInt32, MutUntrackedOrigin]

comptime PREFILL_MIN_QUERIES = 64
"""Queries a KV head of a prefill block, at least."""
comptime PREFILL_MAX_QUERIES = 256
"""Queries a KV head of a block, at most: the weighted values of more would not stay in the cache."""
comptime STEP_TILES = 2
"""KV tiles of a step. The weighted values are loaded and stored once a step."""
comptime STEP_TOKENS = STEP_TILES * KV_TILE_TOKENS
comptime QUERY_COLUMNS = 16
"""Queries of a query tile. Two query tiles, a pair, are computed together."""
comptime PAIR_SCORE_FLOATS = 2 * STEP_TOKENS * QUERY_COLUMNS + 512
"""Memory for the scores of a pair of query tiles. It is no multiple of 4 KB, because a load waits for pending stores
whose addresses have the same low 12 bits."""
comptime NO_PAIR = -1
"""The pair before the first and after the last."""


def padded_queries(queries: Int) -> Int:
    """`queries` rounded up to whole pairs of query tiles."""
    return ceildiv(queries, 2 * QUERY_COLUMNS) * 2 * QUERY_COLUMNS


struct PrefillWorkspace(Movable, RunningStates):
    """Working memory of one task for one KV head of a prefill block. Q is `padded_queries`, P the padded head_dim."""

    var memory: List[Float32]
    var offsets: List[Int]
    """The token offsets of `STEP_TILES` tiles."""
    var q: Bf16BitsPointer
    """`[Q / 16, P / 32, 16 pairs, 16, 2]`."""
    var keys: Bf16BitsPointer
    """`[STEP_TOKENS, P]`."""
    var values: Bf16BitsPointer
    """`[STEP_TILES, P / 16, 16 pairs of tokens, 16, 2]`."""
    var scores: FloatPointer
    """`[2, PAIR_SCORE_FLOATS]`, each `[2, STEP_TOKENS, 16]`: the scores of two pairs of query tiles, in turn."""
    var weights: Bf16BitsPointer
    """`[2, STEP_TILES, 2, 2, 16, 32]` bfloat16: the weights of two pairs, of each query tile the rounded weights and
    then what the rounding left."""
    var transpose_buffer: Bf16PairPointer
    """`[2, 16 pairs of tokens, 16]`: weights before they are transposed."""
    var own_acc: FloatPointer
    """`[Q, P]`: memory for the weighted values of a block that is not split."""
    var acc: FloatPointer
    """`[Q, P]`: weighted values, in `own_acc` or in a split result."""
    var greatest: FloatPointer
    """`[Q]`: each query's reference, which its weights are relative to."""
    var totals: FloatPointer
    """`[Q]`: the sum of each query's weights."""
    var first: Int32Pointer
    """`[Q]`: the first token that a query sees."""
    var last: Int32Pointer
    """`[Q]`: the token after the last one that a query sees."""

    def __init__(out self, queries: Int, padded_dim: Int):
        var room = padded_queries(queries)
        var q = room * padded_dim // 2
        var keys = STEP_TOKENS * padded_dim // 2
        var scores = 2 * PAIR_SCORE_FLOATS
        var weights = 4 * STEP_TILES * AMX_TILE_ELEMENTS
        var transpose_buffer = 2 * 16 * QUERY_COLUMNS
        self.memory = List[Float32](
            unsafe_uninit_length=q + 2 * keys + scores + weights + transpose_buffer + room * padded_dim + 4 * room + 16
        )
        self.offsets = List[Int](length=2 * STEP_TILES * (KV_TILE_TOKENS + OFFSET_WIDTH), fill=0)
        var at = align_to_line(untracked(self.memory.unsafe_ptr()))
        self.q = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(q)
        self.keys = at.unsafe_bitcast[UInt16]()
        self.values = at.unsafe_offset(keys).unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(2 * keys)
        self.scores = at
        at = at.unsafe_offset(scores)
        self.weights = at.unsafe_bitcast[UInt16]()
        at = at.unsafe_offset(weights)
        self.transpose_buffer = at.unsafe_bitcast[UInt32]()
        at = at.unsafe_offset(transpose_buffer)
        self.own_acc = at
        self.acc = at
        at = at.unsafe_offset(room * padded_dim)
        self.greatest = at
        self.totals = at.unsafe_offset(room)
        self.first = at.unsafe_offset(2 * room).unsafe_bitcast[Int32]()
        self.last = at.unsafe_offset(3 * room).unsafe_bitcast[Int32]()

    def offset_buffer(self, index: Int) -> IntPointer:
        """The offsets of tile `index` of a step."""
        return untracked(self.offsets.unsafe_ptr()).unsafe_offset(2 * (KV_TILE_TOKENS + OFFSET_WIDTH) * index)

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(self.greatest[unsafe_offset=query], self.totals[unsafe_offset=query])


struct PrefillStep(Movable):
    """The tokens of one step: up to `STEP_TILES` KV tiles, adjacent tokens in order."""

    var tiles: Array[KVTile, STEP_TILES]
    var count: Int
    """Tiles that have a token."""
    var end: Int
    """The token after the last one."""

    def __init__(
        out self,
        k: PagedKVCache,
        v: type_of(k),
        request: Int,
        begin: Int,
        end: Int,
        workspace: PrefillWorkspace,
    ):
        self.end = begin
        self.count = 0
        self.tiles = Array[KVTile, STEP_TILES](fill=KVTile(k, v, request, begin, begin, workspace.offset_buffer(0)))
        comptime for i in range(STEP_TILES):
            if self.end < end:
                self.tiles[i] = KVTile(k, v, request, self.end, end, workspace.offset_buffer(i))
                self.end += self.tiles[i].count
                self.count += 1

    @always_inline
    def visible_tiles(self, pair: Int, workspace: PrefillWorkspace) -> Int:
        """The number of tiles up to the last token that a query of the pair sees; 0 for `NO_PAIR`."""
        if pair == NO_PAIR:
            return 0
        var last = Int(workspace.last.unsafe_load[width=2 * QUERY_COLUMNS](pair * 2 * QUERY_COLUMNS).reduce_max())
        var count = 0
        comptime for i in range(STEP_TILES):
            if i < self.count and self.tiles[i].first < last:
                count += 1
        return count
