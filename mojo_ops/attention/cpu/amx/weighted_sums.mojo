"""The weighted sums of one KV tile on matrix tiles, computed while its V is interleaved.

The weights are the left operand. V is the right one, copied with its tokens interleaved in pairs. A weight is the sum
of two bfloat16, so it keeps at least 16 bits, and the result is as exact as in float32 arithmetic.
"""

from std.utils import IndexList

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_dot, tile_load, tile_store
from ....isa.convert import LANES, load_bits
from ....isa.bf16_lookup import Bf16Words, ByteVector, LookupTables, bf16_words, zip_mask
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ..bf16_chunk import Bf16Chunk
from ..kv_tile import KVTile
from ..prefetch import KV_TILE_TOKENS, Prefetcher
from ..workspace import HeadLayout, SegmentWorkspace
from .layout import AmxBuffers, LAYOUT_TOKENS, TMM_KV, TMM_SUMS, TMM_WEIGHTS_HIGH, TMM_WEIGHTS_LOW


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
    """Adds the tile's weighted V of one KV head.

    The last chunk is added in the call for the next head, or at the end of the call for the last head: V is interleaved
    one chunk before its products, so that the stores are done when matrix tiles are loaded from there.
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
        sums.select_chunk(heads, head, c, buffer, buffers, workspace)
    if head == heads.kv_heads - 1:
        comptime for strip in range(strips):
            sums.add[strip]()
        sums.flush()


struct ValueProducts[chunk: Int](TrivialRegisterPassable):
    """The weighted sums of one chunk after the other, a strip of 16 elements at a time.

    The latency of a product is some 50 cycles, and an instruction that waits for it delays all later ones. So a strip's
    first product, its second one and the store of its sums are in three calls of `add`.
    """

    var acc: FloatPointer
    """`[stride, P]`, from the first element of the selected chunk on: its sums."""
    var weights: Bf16BitsPointer
    """`[stride, 2, KV_TILE_TOKENS]` bfloat16: the weights of its KV head."""
    var values: Bf16BitsPointer
    """`[chunk / 16, KV_TILE_TOKENS / 2, 16, 2]` bfloat16: the selected chunk of V."""
    var even: FloatPointer
    """The memory of the sums in register `TMM_SUMS`, those of the last even strip."""
    var odd: FloatPointer
    """The memory of the sums in `TMM_SUMS + 1`, those of the last odd strip."""
    var begun: Int
    """Strips since the last `flush`. The last one lacks its second product, the last two are not stored."""
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
    def select_chunk(
        mut self, heads: HeadLayout, head: Int, c: Int, buffer: Int, buffers: AmxBuffers, workspace: SegmentWorkspace
    ):
        """Selects chunk `c` of a KV head, which is interleaved in `buffer`, 0 or 1."""
        self.acc = workspace.acc.unsafe_offset(head * self.stride * heads.padded_dim + c * Self.chunk)
        self.weights = workspace.weights.unsafe_offset(head * self.stride * KV_TILE_TOKENS).unsafe_bitcast[UInt16]()
        self.values = buffers.values.unsafe_offset(buffer * KV_TILE_TOKENS * Self.chunk)

    @always_inline
    def add[strip: Int](mut self):
        """Continues the last two strips and begins strip `strip` of the selected chunk. Strips are added in order."""
        comptime register = TMM_SUMS + strip % 2
        var sums = self.acc.unsafe_offset(strip * LANES)
        var values = self.values.unsafe_offset(strip * LANES * KV_TILE_TOKENS)
        if self.columns < self.stride:
            # The products of several matrix tiles of queries are independent, so their latencies overlap.
            for block in range(0, self.stride, self.columns):
                var target = sums.unsafe_offset(block * self.pitch // 4)
                self.load_weights(block)
                tile_load[register](target, self.pitch)
                tile_load[TMM_KV](values, 64)
                tile_dot[register, TMM_WEIGHTS_HIGH, TMM_KV]()
                tile_dot[register, TMM_WEIGHTS_LOW, TMM_KV]()
                tile_store[register](target, self.pitch)
            return
        self.complete_previous[strip]()
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
    def complete_previous[strip: Int](self):
        """Adds the second product of the strip before `strip`, and stores the strip before that."""
        if self.begun > 0:
            tile_dot[TMM_SUMS + 1 - strip % 2, TMM_WEIGHTS_LOW, TMM_KV]()
        if self.begun > 1:
            tile_store[TMM_SUMS + strip % 2](self.even if strip % 2 == 0 else self.odd, self.pitch)

    @always_inline
    def flush(mut self):
        """Completes and stores the last strips, after the last strip of a chunk."""
        self.complete_previous[0]()
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
    """Interleaves one chunk of V, of tokens `part * LAYOUT_TOKENS` and on, zeros for tokens past the tile's last."""
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
            # A slot past the last token may hold NaN, so it is not multiplied, not even by weight 0.
            if token < tile.count:
                a = load_bits[bits, False, chunk](first, min(chunk, dim - d))
            if token + 1 < tile.count:
                b = load_bits[bits, False, chunk](second, min(chunk, dim - d))
        zip_tokens[dtype](a, b, values.unsafe_offset(token * LANES))


@always_inline
def zip_tokens[dtype: DType](a: SIMD, b: type_of(a), target: Bf16BitsPointer):
    """Interleaves the chunks of two tokens as bfloat16: one row of the matrix tile of each strip.

    Stored elements are interleaved before they are widened, which takes half as many shuffles for float8.
    """
    comptime for upper in range(2):
        comptime mask = zip_mask[a.length](upper * a.length // 8)
        var zipped = a.shuffle[mask=mask](b)
        var rows = target.unsafe_offset(upper * a.length // 2 * KV_TILE_TOKENS)
        comptime if dtype == DType.bfloat16:
            rows.unsafe_store(0, rebind[Bf16Words](zipped))
        else:
            var words = bf16_words(rebind[ByteVector](zipped), LookupTables[dtype]())
            rows.unsafe_store(0, words[0])
            rows.unsafe_store(LANES * KV_TILE_TOKENS, words[1])


@always_inline
def unpack_sums[kv_dtype: DType](acc: Pointer[Float32, _]) -> SIMD[DType.float32, Bf16Chunk[kv_dtype].length]:
    """A chunk of weighted sums in its natural order, from matrix tiles whose columns `zip_mask` ordered."""
    comptime if kv_dtype == DType.bfloat16:
        return rebind[SIMD[DType.float32, Bf16Chunk[kv_dtype].length]](
            acc.unsafe_load[width=32]().shuffle[mask=natural_mask[32]()](acc.unsafe_load[width=32]())
        )
    else:
        return rebind[SIMD[DType.float32, Bf16Chunk[kv_dtype].length]](
            acc.unsafe_load[width=64]().shuffle[mask=natural_mask[64]()](acc.unsafe_load[width=64]())
        )


def natural_mask[length: Int]() -> IndexList[length]:
    """The column of each element of a chunk, counted through its matrix tiles."""
    comptime run = length // 4  # elements that share 16 bytes of every word vector
    var mask = IndexList[length]()
    for element in range(length):
        var part = element % run // 8
        mask[element] = part * 32 + element % 8 // 4 * 16 + element // run * 4 + element % 4
    return mask
