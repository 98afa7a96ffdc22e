"""The working memory of attention in blocks of many queries (`blocks_amx.mojo`), and the tokens of one of its steps."""

from std.math import ceildiv

from ....cache.paged_kv_cache import PagedKVCache
from ...softmax import AttentionState
from ..kv_tile import Floats, STEP, Summed, Tile
from ..prefetch import Offsets, TILE

comptime Words16 = Pointer[UInt16, MutUntrackedOrigin]
comptime Numbers = Pointer[Int32, MutUntrackedOrigin]
comptime Pairs = Pointer[UInt32, MutUntrackedOrigin]

comptime WIDE = 64
"""Queries a KV head from which on a block goes head by head."""
comptime MAX_QUERIES = 256
"""Queries a KV head of a block: more of them make the sums fall out of the cache."""
comptime SPANS = 2
"""Runs of `TILE` tokens of a step: the sums are loaded and stored once a step."""
comptime TOKENS = SPANS * TILE
comptime COLUMNS = 16
"""Queries of a tile; two tiles of them are computed together."""
comptime WORDS = 16 * 32
"""Elements of a tile of bfloat16."""
comptime SCORES = 2 * TOKENS * COLUMNS + 512
"""Room for the scores of a pair of query tiles. Not a multiple of 4 KB: loads wait for pending stores that share their low
12 address bits."""
comptime NO_PAIR = -1


def room_of(queries: Int) -> Int:
    """The queries that a block's `queries` take room for."""
    return ceildiv(queries, 2 * COLUMNS) * 2 * COLUMNS


struct Desk(Movable, Summed):
    """Working memory of one task for one KV head of a block. Q is the room for queries, P the padded head_dim."""

    var memory: List[Float32]
    var places: List[Int]
    var q: Words16
    """`[Q / 16, P / 32, 16 pairs, 16, 2]`."""
    var keys: Words16
    """`[TOKENS, P]`."""
    var values: Words16
    """`[SPANS, P / 16, 16 pairs of tokens, 16, 2]`."""
    var scores: Floats
    """`[2, SCORES]`, each `[2, TOKENS, 16]`: of two pairs of tiles in turn."""
    var weights: Words16
    """`[2, SPANS, 2, 2, 16, 32]`: likewise; bfloat16, of each 16 queries what rounding gives, then what it left."""
    var turning: Pairs
    """`[2, 16 pairs of tokens, 16]`: weights on their way there."""
    var own: Floats
    var acc: Floats
    """`[Q, P]`: weighted values; `own`, or a partial result."""
    var greatest: Floats
    """`[Q]`: what a query's weights are relative to."""
    var totals: Floats
    """`[Q]`."""
    var first: Numbers
    """`[Q]`: the tokens `[first, last)` that a query sees."""
    var last: Numbers

    def __init__(out self, queries: Int, padded: Int):
        var room = room_of(queries)
        var q = room * padded // 2
        var keys = TOKENS * padded // 2
        var scores = 2 * SCORES
        var weights = 4 * SPANS * WORDS
        var turning = 2 * 16 * COLUMNS
        self.memory = List[Float32](
            unsafe_uninit_length=q + 2 * keys + scores + weights + turning + room * padded + 4 * room + 16
        )
        self.places = List[Int](length=2 * SPANS * (TILE + STEP), fill=0)
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
        self.turning = at.unsafe_bitcast[UInt32]()
        at = at.unsafe_offset(turning)
        self.own = at
        self.acc = at
        at = at.unsafe_offset(room * padded)
        self.greatest = at
        self.totals = at.unsafe_offset(room)
        self.first = at.unsafe_offset(2 * room).unsafe_bitcast[Int32]()
        self.last = at.unsafe_offset(3 * room).unsafe_bitcast[Int32]()

    def place(self, index: Int) -> Offsets:
        return (
            self.places.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(2 * (TILE + STEP) * index)
        )

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(self.greatest[unsafe_offset=query], self.totals[unsafe_offset=query])


struct Step(Movable):
    """The tokens of one step: up to `SPANS` tiles one after the other."""

    var tiles: Array[Tile, SPANS]
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
        desk: Desk,
    ):
        self.end = begin
        self.count = 0
        self.tiles = Array[Tile, SPANS](fill=Tile(k, v, request, begin, begin, desk.place(0)))
        comptime for i in range(SPANS):
            if self.end < end:
                self.tiles[i] = Tile(k, v, request, self.end, end, desk.place(i))
                self.end += self.tiles[i].count
                self.count += 1

    @always_inline
    def seen_by(self, pair: Int, desk: Desk) -> Int:
        """How many of the tiles are not past the last token that a query of the pair sees; 0 for no pair."""
        if pair == NO_PAIR:
            return 0
        var last = Int(desk.last.unsafe_load[width=2 * COLUMNS](pair * 2 * COLUMNS).reduce_max())
        var count = 0
        comptime for i in range(SPANS):
            if i < self.count and self.tiles[i].first < last:
                count += 1
        return count
