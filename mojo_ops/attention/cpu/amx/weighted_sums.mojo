"""The weighted sums of one tile of tokens on matrix tiles (`tiles_amx.mojo`), while V is laid out for them.

The weights are the left operand, V the right one, its tokens interleaved in pairs on the way. A weight enters as the sum of
two bfloat16, so that it keeps 16 bits and more: the result is as good as float32 arithmetic makes it.
"""

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_dot, tile_load, tile_store
from ....isa.convert import LANES, load_bits
from ....isa.float8 import ByteVector, Bf16Words, float8_words, zip_mask
from ..kv_tile import FloatPointer, HeadLayout, SegmentWorkspace, KVTile
from ..prefetch import Prefetcher, KV_TILE_TOKENS
from .layout import AmxBuffers, TMM_WEIGHTS_HIGH, TMM_WEIGHTS_LOW, LAYOUT_TOKENS, TMM_KV, TMM_SUMS, Bf16BitsPointer
from .widen import Bf16Chunk


@always_inline
def sum_tile_amx(
    v: PagedKVCache,
    tile: KVTile,
    heads: HeadLayout,
    head: Int,
    buffers: AmxBuffers,
    workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
    mut sums: ValueProducts,
):
    """Adds the tile's weighted V of one KV head, but for its last chunk, which the call for the next head adds.

    V is laid out one chunk ahead, so that the stores are done when the tiles are loaded from there.
    """
    comptime chunk = Bf16Chunk[v.dtype].length
    comptime parts = KV_TILE_TOKENS // LAYOUT_TOKENS
    comptime strips = chunk // LANES
    var chunks = heads.padded_dim // chunk
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    for c in range(chunks):
        var buffer = (head * chunks + c) % 2
        comptime for part in range(parts):
            comptime if part * strips % parts == 0:
                if head > 0 or c > 0:
                    sums.add[part * strips // parts]()
            prefetcher.run()
            pair_tokens[part](
                base, tile, c * chunk, heads.head_dim, buffers.values.unsafe_offset(buffer * KV_TILE_TOKENS * chunk)
            )
        sums.choose(heads, head, c, buffer, buffers, workspace)
    if head == heads.kv_heads - 1:
        comptime for strip in range(strips):
            sums.add[strip]()
        sums.finish()


struct ValueProducts[chunk: Int](TrivialRegisterPassable):
    """The weighted sums of one chunk after the other, a strip of 16 elements at a time.

    A product is there after some 50 cycles, and what waits for it holds up all that comes after. So a strip's first product,
    its second one and the store of its sums are done in three calls of `add`.
    """

    var acc: FloatPointer
    """The sums of the chosen chunk, `[stride, P]` from its first element on."""
    var weights: Bf16BitsPointer
    """`[stride, 2, KV_TILE_TOKENS]` bfloat16: its KV head's."""
    var values: Bf16BitsPointer
    """`[chunk / 16, KV_TILE_TOKENS / 2, 16, 2]` bfloat16."""
    var even: FloatPointer
    """Where the sums of the last even strip belong, which are in register `TMM_SUMS`."""
    var odd: FloatPointer
    """Where those in `TMM_SUMS + 1` do."""
    var begun: Int
    """Strips since the last `finish`: of the last one the second product is missing, of the last two the store."""
    var columns: Int
    var stride: Int
    var pitch: Int
    """Bytes from the sums of one query to those of the next."""

    @always_inline
    def __init__(out self, heads: HeadLayout, buffers: AmxBuffers, workspace: SegmentWorkspace):
        self.acc = workspace.acc
        self.weights = workspace.weights.unsafe_bitcast[UInt16]()
        self.values = buffers.values
        self.even = workspace.acc
        self.odd = workspace.acc
        self.begun = 0
        self.columns = buffers.columns
        self.stride = buffers.stride
        self.pitch = heads.padded_dim * 4

    @always_inline
    def choose(
        mut self, heads: HeadLayout, head: Int, c: Int, buffer: Int, buffers: AmxBuffers, workspace: SegmentWorkspace
    ):
        """Chunk `c` of a KV head is what comes next, laid out in `buffer`, 0 or 1."""
        self.acc = workspace.acc.unsafe_offset(head * self.stride * heads.padded_dim + c * Self.chunk)
        self.weights = workspace.weights.unsafe_offset(head * self.stride * KV_TILE_TOKENS).unsafe_bitcast[UInt16]()
        self.values = buffers.values.unsafe_offset(buffer * KV_TILE_TOKENS * Self.chunk)

    @always_inline
    def add[strip: Int](mut self):
        """Goes on with the last two strips, and begins the chosen chunk's strip `strip`; they come in order."""
        comptime register = TMM_SUMS + strip % 2
        var sums = self.acc.unsafe_offset(strip * LANES)
        var values = self.values.unsafe_offset(strip * LANES * KV_TILE_TOKENS)
        if self.columns < self.stride:
            # Several blocks of queries: their products are independent enough.
            for block in range(0, self.stride, self.columns):
                var target = sums.unsafe_offset(block * self.pitch // 4)
                self.load_weights(block)
                tile_load[register](target, self.pitch)
                tile_load[TMM_KV](values, 64)
                tile_dot[register, TMM_WEIGHTS_HIGH, TMM_KV]()
                tile_dot[register, TMM_WEIGHTS_LOW, TMM_KV]()
                tile_store[register](target, self.pitch)
            return
        self.go_on[strip]()
        comptime if strip == 0:
            self.load_weights(0)
        comptime if strip % 2 == 0:
            self.even = sums
        else:
            self.odd = sums
        tile_load[register](sums, self.pitch)
        tile_load[TMM_KV](values, 64)
        tile_dot[register, TMM_WEIGHTS_HIGH, TMM_KV]()
        self.begun += 1

    @always_inline
    def go_on[strip: Int](self):
        """The second product of the strip before `strip`, and the store of the one before that."""
        if self.begun > 0:
            tile_dot[TMM_SUMS + 1 - strip % 2, TMM_WEIGHTS_LOW, TMM_KV]()
        if self.begun > 1:
            tile_store[TMM_SUMS + strip % 2](self.even if strip % 2 == 0 else self.odd, self.pitch)

    @always_inline
    def finish(mut self):
        """Stores what is missing, after a chunk's last strip."""
        self.go_on[0]()
        if self.begun > 0:
            tile_store[TMM_SUMS + 1](self.odd, self.pitch)
        self.begun = 0

    @always_inline
    def load_weights(self, block: Int):
        var weights = self.weights.unsafe_offset(2 * block * KV_TILE_TOKENS)
        tile_load[TMM_WEIGHTS_HIGH](weights, KV_TILE_TOKENS * 4)
        tile_load[TMM_WEIGHTS_LOW](weights.unsafe_offset(KV_TILE_TOKENS), KV_TILE_TOKENS * 4)


@always_inline
def pair_tokens[
    dtype: DType, //, part: Int
](base: Pointer[Scalar[dtype], _], tile: KVTile, d: Int, dim: Int, values: Bf16BitsPointer):
    """Lays out one chunk of V of part `part` of the tokens for the multiplication."""
    comptime chunk = Bf16Chunk[dtype].length
    comptime bits = DType.uint16 if dtype == DType.bfloat16 else DType.uint8
    var whole = tile.count == KV_TILE_TOKENS and d + chunk <= dim
    comptime for i in range(LAYOUT_TOKENS // 2):
        comptime token = part * LAYOUT_TOKENS + 2 * i
        var first = base.unsafe_offset(tile.v[unsafe_offset=token] + d)
        var second = base.unsafe_offset(tile.v[unsafe_offset=token + 1] + d)
        var a = SIMD[bits, chunk](0)
        var b = SIMD[bits, chunk](0)
        if whole:
            a = load_bits[bits, True, chunk](first, chunk)
            b = load_bits[bits, True, chunk](second, chunk)
        else:
            # No token past the last may enter, not even with weight 0: its slot may hold NaN.
            if token < tile.count:
                a = load_bits[bits, False, chunk](first, min(chunk, dim - d))
            if token + 1 < tile.count:
                b = load_bits[bits, False, chunk](second, min(chunk, dim - d))
        zip_tokens[dtype](a, b, values.unsafe_offset(token * LANES))


@always_inline
def zip_tokens[dtype: DType](a: SIMD, b: type_of(a), target: Bf16BitsPointer):
    """The pairs of two tokens' chunks as bfloat16, for the tiles of their strips: one row of each.

    Stored elements are zipped before they are widened: that takes half as many shuffles for float8.
    """
    comptime for upper in range(2):
        comptime mask = zip_mask[a.length](upper * a.length // 8)
        var zipped = a.shuffle[mask=mask](b)
        var rows = target.unsafe_offset(upper * a.length // 2 * KV_TILE_TOKENS)
        comptime if dtype == DType.bfloat16:
            rows.unsafe_store(0, rebind[Bf16Words](zipped))
        else:
            var words = float8_words[dtype](rebind[ByteVector](zipped))
            rows.unsafe_store(0, words[0])
            rows.unsafe_store(LANES * KV_TILE_TOKENS, words[1])
