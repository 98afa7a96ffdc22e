"""What one tile of tokens and all queries of a block need, whatever computes them: places, memory, the softmax."""

from std.math import align_up, iota
from std.memory import bitcast
from std.utils.numerics import nan

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.convert import LANES
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, MINUS_INFINITY, exp2
from .plan import Segment
from .prefetch import Prefetcher, EARLY_V_TOKENS, SPAN_TOKENS, IntPointer, RUN_TOKENS, STREAMS, KV_TILE_TOKENS

comptime FloatPointer = Pointer[Float32, MutUntrackedOrigin]
comptime RESCALE_THRESHOLD: Float32 = 8
"""How far scores may exceed the reference, in powers of two, before what was summed up is scaled down."""
comptime OFFSET_WIDTH = 8
"""Tokens of a page whose places are written at once."""
comptime SPAN_TILES = SPAN_TOKENS // KV_TILE_TOKENS
"""Tiles of a field."""
comptime TILE_BUFFERS = 2 * SPAN_TILES
comptime ScoreVector = SIMD[DType.float32, KV_TILE_TOKENS]


@fieldwise_init
struct HeadLayout(ImplicitlyCopyable):
    """The sizes that all heads of a call share."""

    var kv_heads: Int
    var group: Int
    var head_dim: Int
    var padded_dim: Int
    """P: head_dim rounded up to what the arithmetic takes at once."""
    var k_stride: Int
    """Bf16Pointer from one KV head of a token to the next."""
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
    def adjacent(self) -> Bool:
        """Whether the heads of a token lie side by side, in K and in V."""
        return self.k_stride == self.head_dim and self.v_stride == self.head_dim


trait RunningStates:
    """What has seen some tokens."""

    def state(self, query: Int) -> AttentionState:
        """The state of one query of one KV head."""
        ...


struct SegmentWorkspace(Movable, RunningStates):
    """Working memory of one task, for a block of rows of one request.

    A KV head has M queries: the rows of the block times the group; room is kept for `stride` of them.
    """

    var memory: List[Float32]
    var offsets: List[Int]
    """The offsets of `TILE_BUFFERS` tiles, those of now and those that are next, and `Prefetcher`'s rows."""
    var tiles: List[KVTile]
    """`[TILE_BUFFERS]`."""
    var q: FloatPointer
    """`[Hk, stride, P]` float32 in the order of the lanes; with AMX pairs of bfloat16 instead."""
    var acc: FloatPointer
    """`[Hk, stride, P]`: weighted values, likewise."""
    var weights: FloatPointer
    """`[slots, stride, KV_TILE_TOKENS]`: scores, then weights; with AMX `[Hk, stride, 2, KV_TILE_TOKENS]` bfloat16."""
    var amx_floats: FloatPointer
    """What else an buffers asked for."""
    var greatest: FloatPointer
    """`[Hk, stride]`: what each query's weights are relative to: no score so far exceeds it by more than `RESCALE_THRESHOLD`."""
    var totals: FloatPointer
    """`[Hk, stride, LANES]`: the sum of its weights, in as many parts."""

    def __init__(out self, heads: HeadLayout, stride: Int, amx_floats: Int):
        var queries = heads.kv_heads * stride
        var weights = max(heads.kv_heads, SPAN_TILES) * stride * KV_TILE_TOKENS
        self.memory = List[Float32](
            length=queries * (2 * heads.padded_dim + LANES + 1) + weights + amx_floats + 16, fill=0
        )
        var rows = (KV_TILE_TOKENS + EARLY_V_TOKENS) * max(heads.kv_heads, SPAN_TILES)
        self.offsets = List[Int](length=TILE_BUFFERS * 2 * (KV_TILE_TOKENS + OFFSET_WIDTH) + rows, fill=0)
        self.tiles = List[KVTile](unsafe_uninit_length=TILE_BUFFERS)
        # Vectors must not straddle cache lines.
        var start = self.memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        self.q = start.unsafe_offset((64 - Int(start) % 64) % 64 // 4)
        self.acc = self.q.unsafe_offset(queries * heads.padded_dim)
        self.weights = self.acc.unsafe_offset(queries * heads.padded_dim)
        self.totals = self.weights.unsafe_offset(weights)
        self.amx_floats = self.totals.unsafe_offset(queries * LANES)
        self.greatest = self.amx_floats.unsafe_offset(amx_floats)

    @always_inline
    def clear(mut self, query: Int):
        """Forgets what one query of one KV head has seen."""
        self.greatest[unsafe_offset=query] = MINUS_INFINITY
        self.totals.unsafe_store(query * LANES, SIMD[DType.float32, LANES](0))

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(
            self.greatest[unsafe_offset=query], self.totals.unsafe_load[width=LANES](query * LANES).reduce_add()
        )

    def tile(self, index: Int) -> Pointer[KVTile, MutUntrackedOrigin]:
        return (
            self.tiles.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(index)
        )

    def offset_buffer(self, index: Int) -> IntPointer:
        """The memory of a tile, or (`TILE_BUFFERS`) of `Prefetcher`'s rows."""
        return (
            self.offsets.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(2 * (KV_TILE_TOKENS + OFFSET_WIDTH) * index)
        )


struct KVTile(TrivialRegisterPassable):
    """Where the tokens of one tile lie: elements from the start of K's and of V's blocks to their first head."""

    var k: IntPointer
    """`[KV_TILE_TOKENS]`."""
    var v: IntPointer
    var count: Int
    """Tokens; the entries past them repeat the last, so that it is safe to read there."""
    var first: Int
    """The first token."""
    var interleaved: Bool
    """Whether entry `i` is token `first + i % STREAMS * RUN_TOKENS + i // STREAMS`: some of each run; else `first + i`."""

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, begin: Int, end: Int, offsets: IntPointer):
        """The tokens from `begin` to the next multiple of `KV_TILE_TOKENS`, or to `end`: pages of 16 then fit."""
        self.k = offsets
        self.v = offsets.unsafe_offset(KV_TILE_TOKENS + OFFSET_WIDTH)
        self.count = max(0, min(KV_TILE_TOKENS - begin % KV_TILE_TOKENS, end - begin))
        var size = k.slots()
        self.first = begin
        self.interleaved = False
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
            for j in range(0, run, OFFSET_WIDTH):
                var steps = iota[DType.int, OFFSET_WIDTH](j)
                self.k.unsafe_store(i + j, steps * k_at.slot + k_offset)
                self.v.unsafe_store(i + j, steps * v_at.slot + v_offset)
            i += run
            slot = 0
            page_slot += 1
        if self.count > 0:
            for rest in range(self.count, KV_TILE_TOKENS):
                self.k[unsafe_offset=rest] = self.k[unsafe_offset=self.count - 1]
                self.v[unsafe_offset=rest] = self.v[unsafe_offset=self.count - 1]

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, *, span: Int, tile: Int, offsets: IntPointer):
        """Part `part` of the field that begins at token `field`: tokens `4 part` to `4 part + 3` of each run."""
        comptime EACH = KV_TILE_TOKENS // STREAMS
        self.k = offsets
        self.v = offsets.unsafe_offset(KV_TILE_TOKENS + OFFSET_WIDTH)
        self.count = KV_TILE_TOKENS
        self.first = span + tile * EACH
        self.interleaved = True
        var size = k.slots()
        for run in range(STREAMS):
            var page_slot, slot = divmod(self.first + run * RUN_TOKENS, size)
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
    def tokens(self) -> SIMD[DType.int32, KV_TILE_TOKENS]:
        """The token of each entry."""
        var entry = iota[DType.int32, KV_TILE_TOKENS](0)
        if self.interleaved:
            entry = entry % STREAMS * RUN_TOKENS + entry // STREAMS
        return entry + Int32(self.first)

    @always_inline
    def end(self) -> Int:
        """The token past the last entry's, missing ones included."""
        return self.first + (
            SPAN_TOKENS - RUN_TOKENS + KV_TILE_TOKENS // STREAMS if self.interleaved else KV_TILE_TOKENS
        )


@always_inline
def scores_to_weights[
    dtype: DType, //, split_bf16: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    weights_index: Int,
    tile: KVTile,
    stride: Int,
    mut workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
):
    """ScoreVector become weights; where a query's greatest score rises, what it has summed so far is scaled down.

    The scores are in slot `slot` of `workspace.weights`.

    Parameters:
        split_bf16: Leaves each weight as two bfloat16 whose sum it is: `KV_TILE_TOKENS` of the first, then of the second.
    """
    var m = head * stride
    var tokens = tile.tokens()
    for row in range(segment.num_rows):
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + row])
        var first = logits.first_token(length)
        var last = length if tile.count == KV_TILE_TOKENS else min(length, tile.first + tile.count)
        var all_seen = first <= tile.first and last >= tile.end()
        for g in range(heads.group):
            prefetcher.run()
            var at = workspace.weights.unsafe_offset(((weights_index - head) * stride + m) * KV_TILE_TOKENS)
            var slope = ScoreVector(
                logits.alibi_slopes[unsafe_offset=head * heads.group + g]
            ) if logits.has_alibi else 0
            var scores = logits.score_each(at.unsafe_load[width=KV_TILE_TOKENS](), slope, tokens.cast[DType.float32]())
            if not all_seen:
                scores = (tokens.lt(Int32(last)) & tokens.ge(Int32(first))).select(scores, MINUS_INFINITY)
            var greatest = workspace.greatest[unsafe_offset=m]
            var totals = workspace.totals.unsafe_load[width=LANES](m * LANES)
            # Any reference serves that keeps the weights in range, so it follows the greatest score only from afar:
            # after the first tile hardly ever. NaN counts as greater.
            if not scores.le(greatest + RESCALE_THRESHOLD).reduce_and():
                raise_reference(scores, m, heads.padded_dim, workspace)
                greatest = workspace.greatest[unsafe_offset=m]
                totals = workspace.totals.unsafe_load[width=LANES](m * LANES)
            # A row that sees none of these tokens has no greatest score to subtract yet.
            var weights = exp2(scores - greatest) if greatest != MINUS_INFINITY else ScoreVector(0)
            comptime for half in range(KV_TILE_TOKENS // LANES):
                totals += weights.slice[LANES, offset=half * LANES]()
            workspace.totals.unsafe_store(m * LANES, totals)
            comptime if split_bf16:
                var high = weights.cast[DType.bfloat16]()
                var low = (weights - high.cast[DType.float32]()).cast[DType.bfloat16]()
                var target = at.unsafe_bitcast[UInt16]()
                target.unsafe_store(0, bitcast[DType.uint16, KV_TILE_TOKENS](high))
                target.unsafe_store(KV_TILE_TOKENS, bitcast[DType.uint16, KV_TILE_TOKENS](low))
            else:
                at.unsafe_store(0, weights)
            m += 1


@no_inline
def raise_reference(scores: ScoreVector, query: Int, padded: Int, workspace: SegmentWorkspace):
    """Makes the greatest score what a query's weights are relative to. Kept out of the loop, where it hardly ever runs."""
    var state = AttentionState(workspace.greatest[unsafe_offset=query], 0)
    # `reduce_max` may pass over a NaN.
    var factor = state.raise_to(scores.reduce_max() if scores.eq(scores).reduce_and() else nan[DType.float32]())
    workspace.greatest[unsafe_offset=query] = state.greatest
    workspace.totals.unsafe_store(query * LANES, workspace.totals.unsafe_load[width=LANES](query * LANES) * factor)
    var acc = workspace.acc.unsafe_offset(query * padded)
    for d in range(0, padded, LANES):
        acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * factor)
