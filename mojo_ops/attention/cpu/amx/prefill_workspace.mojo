"""The working memory of attention in blocks of many queries (`blocks_amx.mojo`), and the tokens of one of its steps."""

from std.math import ceildiv

from ....cache.paged_kv_cache import PagedKVCache
from ...softmax import AttentionState
from ..kv_tile import FloatPointer, OFFSET_WIDTH, RunningStates, KVTile
from ..prefetch import IntPointer, KV_TILE_TOKENS

comptime Bf16BitsPointer = Pointer[UInt16, MutUntrackedOrigin]
comptime Int32Pointer = Pointer[Int32, MutUntrackedOrigin]
comptime Bf16PairPointer = Pointer[UInt32, MutUntrackedOrigin]

comptime PREFILL_MIN_QUERIES = 64
"""Queries a KV head from which on a block goes head by head."""
comptime PREFILL_MAX_QUERIES = 256
"""Queries a KV head of a block: more of them make the sums fall out of the cache."""
comptime STEP_TILES = 2
"""Runs of `KV_TILE_TOKENS` tokens of a step: the sums are loaded and stored once a step."""
comptime STEP_TOKENS = STEP_TILES * KV_TILE_TOKENS
comptime QUERY_COLUMNS = 16
"""Queries of a tile; two tiles of them are computed together."""
comptime AMX_TILE_ELEMENTS = 16 * 32
"""Bf16Pointer of a tile of bfloat16."""
comptime PAIR_SCORE_FLOATS = 2 * STEP_TOKENS * QUERY_COLUMNS + 512
"""Room for the scores of a pair of query tiles. Not a multiple of 4 KB: loads wait for pending stores that share their low
12 address bits."""
comptime NO_PAIR = -1


def padded_queries(queries: Int) -> Int:
    """The queries that a block's `queries` take room for."""
    return ceildiv(queries, 2 * QUERY_COLUMNS) * 2 * QUERY_COLUMNS


struct PrefillWorkspace(Movable, RunningStates):
    """Working memory of one task for one KV head of a block. Q is the room for queries, P the padded head_dim."""

    var memory: List[Float32]
    var offsets: List[Int]
    var q: Bf16BitsPointer
    """`[Q / 16, P / 32, 16 pairs, 16, 2]`."""
    var keys: Bf16BitsPointer
    """`[STEP_TOKENS, P]`."""
    var values: Bf16BitsPointer
    """`[STEP_TILES, P / 16, 16 pairs of tokens, 16, 2]`."""
    var scores: FloatPointer
    """`[2, PAIR_SCORE_FLOATS]`, each `[2, STEP_TOKENS, 16]`: of two pairs of tiles in turn."""
    var weights: Bf16BitsPointer
    """`[2, STEP_TILES, 2, 2, 16, 32]`: likewise; bfloat16, of each 16 queries what rounding gives, then what it left."""
    var transpose_buffer: Bf16PairPointer
    """`[2, 16 pairs of tokens, 16]`: weights on their way there."""
    var own: FloatPointer
    var acc: FloatPointer
    """`[Q, P]`: weighted values; `own`, or a partial result."""
    var greatest: FloatPointer
    """`[Q]`: what a query's weights are relative to."""
    var totals: FloatPointer
    """`[Q]`."""
    var first: Int32Pointer
    """`[Q]`: the tokens `[first, last)` that a query sees."""
    var last: Int32Pointer

    def __init__(out self, queries: Int, padded: Int):
        var room = padded_queries(queries)
        var q = room * padded // 2
        var keys = STEP_TOKENS * padded // 2
        var scores = 2 * PAIR_SCORE_FLOATS
        var weights = 4 * STEP_TILES * AMX_TILE_ELEMENTS
        var transpose_buffer = 2 * 16 * QUERY_COLUMNS
        self.memory = List[Float32](
            unsafe_uninit_length=q + 2 * keys + scores + weights + transpose_buffer + room * padded + 4 * room + 16
        )
        self.offsets = List[Int](length=2 * STEP_TILES * (KV_TILE_TOKENS + OFFSET_WIDTH), fill=0)
        var start = self.memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        var at = start.unsafe_offset((64 - Int(start) % 64) % 64 // 4)
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
        self.own = at
        self.acc = at
        at = at.unsafe_offset(room * padded)
        self.greatest = at
        self.totals = at.unsafe_offset(room)
        self.first = at.unsafe_offset(2 * room).unsafe_bitcast[Int32]()
        self.last = at.unsafe_offset(3 * room).unsafe_bitcast[Int32]()

    def offset_buffer(self, index: Int) -> IntPointer:
        return (
            self.offsets.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(2 * (KV_TILE_TOKENS + OFFSET_WIDTH) * index)
        )

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(self.greatest[unsafe_offset=query], self.totals[unsafe_offset=query])


struct PrefillStep(Movable):
    """The tokens of one step: up to `STEP_TILES` tiles one after the other."""

    var tiles: Array[KVTile, STEP_TILES]
    var count: Int
    """Tiles with a token."""
    var end: Int

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
        """How many of the tiles are not past the last token that a query of the pair sees; 0 for no pair."""
        if pair == NO_PAIR:
            return 0
        var last = Int(workspace.last.unsafe_load[width=2 * QUERY_COLUMNS](pair * 2 * QUERY_COLUMNS).reduce_max())
        var count = 0
        comptime for i in range(STEP_TILES):
            if i < self.count and self.tiles[i].first < last:
                count += 1
        return count
