"""A KV tile: up to `KV_TILE_TOKENS` tokens of a request, and the offsets of their K and V."""

from std.math import iota

from ...cache.paged_kv_cache import PagedKVCache
from .prefetch import IntPointer, KV_TILE_TOKENS, RUN_TOKENS, SPAN_TOKENS, STREAMS

comptime OFFSET_WIDTH = 8
"""Offsets of adjacent slots that are written with one store."""
comptime SPAN_TILES = SPAN_TOKENS // KV_TILE_TOKENS
"""Tiles of a span."""


struct KVTile(TrivialRegisterPassable):
    """The tokens of one tile and their offsets, in elements from the start of K's and V's blocks to the first head."""

    var k: IntPointer
    """`[KV_TILE_TOKENS]`."""
    var v: IntPointer
    """`[KV_TILE_TOKENS]`."""
    var count: Int
    """Entries up to the last token. Those past it repeat it, and those before the first token repeat that one, so that
    they can be read."""
    var first: Int
    """The first token."""
    var interleaved: Bool
    """True if entry `i` is token `first + i % STREAMS * RUN_TOKENS + i // STREAMS`, else `first + i`."""

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, begin: Int, end: Int, offsets: IntPointer):
        """The tokens from `begin` to the next multiple of `KV_TILE_TOKENS`, or to `end`: whole pages of 16 slots.

        Token `t` is entry `t % KV_TILE_TOKENS`.
        """
        self.k = offsets
        self.v = offsets.unsafe_offset(KV_TILE_TOKENS + OFFSET_WIDTH)
        var size = k.slots()
        var before = begin % KV_TILE_TOKENS
        self.first = begin - before
        self.count = min(KV_TILE_TOKENS, end - self.first) if begin < end else 0
        self.interleaved = False
        var k_at = k.strides()
        var v_at = v.strides()
        var column, slot = divmod(begin, size)
        var i = before
        while i < self.count:
            # The slots of one page. Offsets past them are overwritten in the next iteration.
            var run = min(size - slot, self.count - i)
            var page = k.page(request, column)
            var k_offset = k.offset(page, slot, 0)
            var v_offset = v.offset(page, slot, 0)
            for j in range(0, run, OFFSET_WIDTH):
                var steps = iota[DType.int, OFFSET_WIDTH](j)
                self.k.unsafe_store(i + j, steps * k_at.slot + k_offset)
                self.v.unsafe_store(i + j, steps * v_at.slot + v_offset)
            i += run
            slot = 0
            column += 1
        if self.count > 0:
            for entry in range(before):
                self.k[unsafe_offset=entry] = self.k[unsafe_offset=before]
                self.v[unsafe_offset=entry] = self.v[unsafe_offset=before]
            for rest in range(self.count, KV_TILE_TOKENS):
                self.k[unsafe_offset=rest] = self.k[unsafe_offset=self.count - 1]
                self.v[unsafe_offset=rest] = self.v[unsafe_offset=self.count - 1]

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, *, span: Int, tile: Int, offsets: IntPointer):
        """Tile `tile` of the span that begins at token `span`: tokens `4 * tile` to `4 * tile + 3` of each run."""
        comptime tokens_each = KV_TILE_TOKENS // STREAMS
        self.k = offsets
        self.v = offsets.unsafe_offset(KV_TILE_TOKENS + OFFSET_WIDTH)
        self.count = KV_TILE_TOKENS
        self.first = span + tile * tokens_each
        self.interleaved = True
        var size = k.slots()
        for run in range(STREAMS):
            var column, slot = divmod(self.first + run * RUN_TOKENS, size)
            var page = k.page(request, column)
            for i in range(tokens_each):
                if slot == size:
                    slot = 0
                    column += 1
                    page = k.page(request, column)
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
        """The token after the last entry's, as if no entry were missing."""
        return self.first + (
            SPAN_TOKENS - RUN_TOKENS + KV_TILE_TOKENS // STREAMS if self.interleaved else KV_TILE_TOKENS
        )
