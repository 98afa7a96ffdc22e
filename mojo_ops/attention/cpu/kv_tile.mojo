"""What one tile of tokens and all queries of a block need, whatever computes them: places, memory, the softmax."""

from std.math import align_up, iota
from std.memory import bitcast
from std.utils.numerics import nan

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.convert import HALF
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, MINUS_INFINITY, exp2
from .plan import Segment
from .prefetch import Ahead, EARLY, FIELD, Offsets, RUN, STREAMS, TILE

comptime Floats = Pointer[Float32, MutUntrackedOrigin]
comptime SLACK: Float32 = 8
"""How far scores may exceed the reference, in powers of two, before what was summed up is scaled down."""
comptime STEP = 8
"""Tokens of a page whose places are written at once."""
comptime PARTS = FIELD // TILE
"""Tiles of a field."""
comptime PLACES = 2 * PARTS
comptime Scores = SIMD[DType.float32, TILE]


@fieldwise_init
struct Heads(ImplicitlyCopyable):
    """The sizes that all heads of a call share."""

    var kv_heads: Int
    var group: Int
    var dim: Int
    var padded: Int
    """P: head_dim rounded up to what the arithmetic takes at once."""
    var k_stride: Int
    """Elements from one KV head of a token to the next."""
    var v_stride: Int

    @staticmethod
    def of(rows: AttentionRows, k: PagedKVCache, v: type_of(k), chunk: Int) -> Self:
        var kv_heads = k.num_heads()
        return Self(
            kv_heads,
            rows.num_heads // kv_heads,
            k.head_dim(),
            align_up(k.head_dim(), chunk),
            k.strides().head,
            v.strides().head,
        )

    @always_inline
    def neighbours(self) -> Bool:
        """Whether the heads of a token lie side by side, in K and in V."""
        return self.k_stride == self.dim and self.v_stride == self.dim


trait Summed:
    """What has seen some tokens."""

    def state(self, query: Int) -> AttentionState:
        """The state of one query of one KV head."""
        ...


struct Scratch(Movable, Summed):
    """Working memory of one task, for a block of rows of one request.

    A KV head has M queries: the rows of the block times the group; room is kept for `stride` of them.
    """

    var memory: List[Float32]
    var places: List[Int]
    """The offsets of `PLACES` tiles, those of now and those that are next, and `Ahead`'s rows."""
    var tiles: List[Tile]
    """`[PLACES]`."""
    var q: Floats
    """`[Hk, stride, P]` float32 in the order of the lanes; with AMX pairs of bfloat16 instead."""
    var acc: Floats
    """`[Hk, stride, P]`: weighted values, likewise."""
    var weights: Floats
    """`[slots, stride, TILE]`: scores, then weights; with AMX `[Hk, stride, 2, TILE]` bfloat16."""
    var spare: Floats
    """What else an engine asked for."""
    var greatest: Floats
    """`[Hk, stride]`: what each query's weights are relative to: no score so far exceeds it by more than `SLACK`."""
    var totals: Floats
    """`[Hk, stride, HALF]`: the sum of its weights, in as many parts."""

    def __init__(out self, heads: Heads, stride: Int, spare: Int):
        var queries = heads.kv_heads * stride
        var weights = max(heads.kv_heads, PARTS) * stride * TILE
        self.memory = List[Float32](length=queries * (2 * heads.padded + HALF + 1) + weights + spare + 16, fill=0)
        var rows = (TILE + EARLY) * max(heads.kv_heads, PARTS)
        self.places = List[Int](length=PLACES * 2 * (TILE + STEP) + rows, fill=0)
        self.tiles = List[Tile](unsafe_uninit_length=PLACES)
        # Vectors must not straddle cache lines.
        var start = self.memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        self.q = start.unsafe_offset((64 - Int(start) % 64) % 64 // 4)
        self.acc = self.q.unsafe_offset(queries * heads.padded)
        self.weights = self.acc.unsafe_offset(queries * heads.padded)
        self.totals = self.weights.unsafe_offset(weights)
        self.spare = self.totals.unsafe_offset(queries * HALF)
        self.greatest = self.spare.unsafe_offset(spare)

    @always_inline
    def clear(mut self, query: Int):
        """Forgets what one query of one KV head has seen."""
        self.greatest[unsafe_offset=query] = MINUS_INFINITY
        self.totals.unsafe_store(query * HALF, SIMD[DType.float32, HALF](0))

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(
            self.greatest[unsafe_offset=query], self.totals.unsafe_load[width=HALF](query * HALF).reduce_add()
        )

    def tile(self, index: Int) -> Pointer[Tile, MutUntrackedOrigin]:
        return (
            self.tiles.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(index)
        )

    def place(self, index: Int) -> Offsets:
        """The memory of a tile, or (`PLACES`) of `Ahead`'s rows."""
        return (
            self.places.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(2 * (TILE + STEP) * index)
        )


struct Tile(TrivialRegisterPassable):
    """Where the tokens of one tile lie: elements from the start of K's and of V's blocks to their first head."""

    var k: Offsets
    """`[TILE]`."""
    var v: Offsets
    var count: Int
    """Tokens; the entries past them repeat the last, so that it is safe to read there."""
    var first: Int
    """The first token."""
    var spread: Bool
    """Whether entry `i` is token `first + i % STREAMS * RUN + i // STREAMS`: some of each run; else `first + i`."""

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, begin: Int, end: Int, place: Offsets):
        """The tokens from `begin` to the next multiple of `TILE`, or to `end`: pages of 16 then fit."""
        self.k = place
        self.v = place.unsafe_offset(TILE + STEP)
        self.count = max(0, min(TILE - begin % TILE, end - begin))
        var size = k.slots()
        self.first = begin
        self.spread = False
        var k_at = k.strides()
        var v_at = v.strides()
        var page_slot, slot = divmod(begin, size)
        var i = 0
        while i < self.count:
            # The slots of one page. What is written past them is overwritten next.
            var run = min(size - slot, self.count - i)
            var page = k.page(request, page_slot)
            var k_offset = k.offset(page, slot, 0)
            var v_offset = v.offset(page, slot, 0)
            for j in range(0, run, STEP):
                var steps = iota[DType.int, STEP](j)
                self.k.unsafe_store(i + j, steps * k_at.slot + k_offset)
                self.v.unsafe_store(i + j, steps * v_at.slot + v_offset)
            i += run
            slot = 0
            page_slot += 1
        if self.count > 0:
            for rest in range(self.count, TILE):
                self.k[unsafe_offset=rest] = self.k[unsafe_offset=self.count - 1]
                self.v[unsafe_offset=rest] = self.v[unsafe_offset=self.count - 1]

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, *, field: Int, part: Int, place: Offsets):
        """Part `part` of the field that begins at token `field`: tokens `4 part` to `4 part + 3` of each run."""
        comptime EACH = TILE // STREAMS
        self.k = place
        self.v = place.unsafe_offset(TILE + STEP)
        self.count = TILE
        self.first = field + part * EACH
        self.spread = True
        var size = k.slots()
        for run in range(STREAMS):
            var page_slot, slot = divmod(self.first + run * RUN, size)
            var page = k.page(request, page_slot)
            for i in range(EACH):
                if slot == size:
                    slot = 0
                    page_slot += 1
                    page = k.page(request, page_slot)
                self.k[unsafe_offset=i * STREAMS + run] = k.offset(page, slot, 0)
                self.v[unsafe_offset=i * STREAMS + run] = v.offset(page, slot, 0)
                slot += 1

    @always_inline
    def tokens(self) -> SIMD[DType.int32, TILE]:
        """The token of each entry."""
        var entry = iota[DType.int32, TILE](0)
        if self.spread:
            entry = entry % STREAMS * RUN + entry // STREAMS
        return entry + Int32(self.first)

    @always_inline
    def end(self) -> Int:
        """The token past the last entry's, missing ones included."""
        return self.first + (FIELD - RUN + TILE // STREAMS if self.spread else TILE)


@always_inline
def weigh_tile[
    dtype: DType, //, halves: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: Heads,
    head: Int,
    slot: Int,
    tile: Tile,
    stride: Int,
    mut scratch: Scratch,
    mut ahead: Ahead,
):
    """Scores become weights; where a query's greatest score rises, what it has summed so far is scaled down.

    The scores are in slot `slot` of `scratch.weights`.

    Parameters:
        halves: Leaves each weight as two bfloat16 whose sum it is: `TILE` of the first, then of the second.
    """
    var m = head * stride
    var tokens = tile.tokens()
    for row in range(segment.num_rows):
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + row])
        var first = logits.first_token(length)
        var last = length if tile.count == TILE else min(length, tile.first + tile.count)
        var all_seen = first <= tile.first and last >= tile.end()
        for g in range(heads.group):
            ahead.run()
            var at = scratch.weights.unsafe_offset(((slot - head) * stride + m) * TILE)
            var slope = Scores(logits.alibi_slopes[unsafe_offset=head * heads.group + g]) if logits.has_alibi else 0
            var scores = logits.score_each(at.unsafe_load[width=TILE](), slope, tokens.cast[DType.float32]())
            if not all_seen:
                scores = (tokens.lt(Int32(last)) & tokens.ge(Int32(first))).select(scores, MINUS_INFINITY)
            var greatest = scratch.greatest[unsafe_offset=m]
            var totals = scratch.totals.unsafe_load[width=HALF](m * HALF)
            # Any reference serves that keeps the weights in range, so it follows the greatest score only from afar:
            # after the first tile hardly ever. NaN counts as greater.
            if not scores.le(greatest + SLACK).reduce_and():
                raise_reference(scores, m, heads.padded, scratch)
                greatest = scratch.greatest[unsafe_offset=m]
                totals = scratch.totals.unsafe_load[width=HALF](m * HALF)
            # A row that sees none of these tokens has no greatest score to subtract yet.
            var weights = exp2(scores - greatest) if greatest != MINUS_INFINITY else Scores(0)
            comptime for half in range(TILE // HALF):
                totals += weights.slice[HALF, offset=half * HALF]()
            scratch.totals.unsafe_store(m * HALF, totals)
            comptime if halves:
                var high = weights.cast[DType.bfloat16]()
                var low = (weights - high.cast[DType.float32]()).cast[DType.bfloat16]()
                var target = at.unsafe_bitcast[UInt16]()
                target.unsafe_store(0, bitcast[DType.uint16, TILE](high))
                target.unsafe_store(TILE, bitcast[DType.uint16, TILE](low))
            else:
                at.unsafe_store(0, weights)
            m += 1


@no_inline
def raise_reference(scores: Scores, query: Int, padded: Int, scratch: Scratch):
    """Makes the greatest score what a query's weights are relative to. Kept out of the loop, where it hardly ever runs."""
    var state = AttentionState(scratch.greatest[unsafe_offset=query], 0)
    # `reduce_max` may pass over a NaN.
    var factor = state.raise_to(scores.reduce_max() if scores.eq(scores).reduce_and() else nan[DType.float32]())
    scratch.greatest[unsafe_offset=query] = state.greatest
    scratch.totals.unsafe_store(query * HALF, scratch.totals.unsafe_load[width=HALF](query * HALF) * factor)
    var acc = scratch.acc.unsafe_offset(query * padded)
    for d in range(0, padded, HALF):
        acc.unsafe_store(d, acc.unsafe_load[width=HALF](d) * factor)
