"""Weighted sums over codes as products of integers: weights of 15 bits, as two bytes, by codes of four tokens at once.

The weights of a query over a unit of tokens, times the scales of the tokens, are rounded to multiples of 1/16383 of the
greatest: 64 times finer than bfloat16. Products and their sums are exact. Queries in float32 keep float32 weights.
"""

from std.math import ceildiv, round
from std.memory import bitcast

from ....isa.bf16_lookup import HAS_BYTE_LOOKUP, look_up, permute
from ....isa.codes import units_of
from ....isa.convert import FloatVector, LANES, load_bits, load_pairs
from ....isa.held import held
from ....isa.int8_dot import ByteVector, HAS_VNNI_512, IntVector, int8_dot
from ....isa.memory import FloatPointer
from ..prefetch import IntPointer, KV_TILE_TOKENS, Prefetcher
from ..workspace import ROUNDED_FLOATS

comptime STEP_TOKENS = 4
"""Tokens of a product."""
comptime STRIP = 32
"""Elements of head_dim whose codes are loaded together."""
comptime UPPER = 0
"""The place of the upper bytes of a query's rounded weights; then come the lower ones, what an integer stands for,
and what the offset of the codes adds."""
comptime LOWER = KV_TILE_TOKENS
comptime FACTOR = 2 * KV_TILE_TOKENS
comptime OFFSET_SUM = FACTOR + 4
comptime GREATEST: Float32 = 16383
"""The greatest integer weight: its upper byte is signed, its lower one has 7 bits."""
comptime LEAST_WEIGHT: Float32 = 2e-34
"""If the greatest product of weight and scale is below this, all count as 0: its 16383rd is no normal float32."""


def rounds_weights(q_dtype: DType, kv_dtype: DType) -> Bool:
    """Return whether the weighted sums of this pair are products of integers."""
    var is_written_for = kv_dtype == DType.int8 or kv_dtype == DType.uint8
    return is_written_for and q_dtype != DType.float32 and HAS_BYTE_LOOKUP and HAS_VNNI_512


struct StripConstants[dtype: DType](TrivialRegisterPassable):
    """The constants of `load_four`, made once before the loop that loads (`isa/held.mojo`)."""

    var first: ByteVector
    """The bytes that its first vector takes, of those of four tokens side by side."""
    var second: ByteVector
    """The same of the second; of int4 what keeps the lower half of a byte."""
    var offset: ByteVector
    """The number that makes two's complement codes their numbers plus 128 or 8."""

    @always_inline
    def __init__(out self):
        comptime is_int8 = Self.dtype == DType.int8
        comptime first = four_bytes(0, STRIP if is_int8 else STRIP // 2)
        comptime second = four_bytes(LANES, STRIP) if is_int8 else ByteVector(0x0F)
        self.first = held(first)
        self.second = held(second)
        self.offset = held(ByteVector(0x80 if is_int8 else 0x88))


def strips_at_once(count: Int) -> Int:
    """Strips whose sums stay in registers for `count` queries."""
    return 1 if count == 4 else 2


def code_prefetch_calls(head_dim: Int, count: Int) -> Int:
    """Return how often `sum_codes` calls `prefetcher.run` for a whole tile."""
    var together = STRIP * strips_at_once(count)
    return (head_dim // together + ceildiv(head_dim % together, STRIP)) * KV_TILE_TOKENS // STEP_TOKENS


@always_inline
def round_weights[
    kv_dtype: DType
](weights: FloatPointer, queries: Int, begin: Int, last: Int, rounded: FloatPointer) -> Bool:
    """Rounds entries `[begin, last)` of `weights` `[queries, KV_TILE_TOKENS]`; others count as 0.

    False where a weight is not finite: then `rounded` says nothing.
    """
    comptime Row = SIMD[DType.float32, KV_TILE_TOKENS]
    comptime offset = Int32(128 if kv_dtype == DType.int8 else 8)
    var entries = SIMD[DType.int32, KV_TILE_TOKENS](0)
    comptime for i in range(KV_TILE_TOKENS):
        entries[i] = Int32(i)
    var present = entries.ge(Int32(begin)) & entries.lt(Int32(last))
    var not_finite = Row(0)
    for m in range(queries):
        var row = present.select(weights.unsafe_load[width=KV_TILE_TOKENS](m * KV_TILE_TOKENS), Row(0))
        not_finite = row.fma(Row(0), not_finite)
        var greatest = abs(row).reduce_max()
        var inverse = GREATEST / greatest if greatest > LEAST_WEIGHT else Float32(0)
        var whole = round(row * inverse).cast[DType.int32]()
        var target = rounded.unsafe_offset(m * ROUNDED_FLOATS).unsafe_bitcast[Int8]()
        target.unsafe_store(UPPER, (whole >> 7).cast[DType.int8]())
        target.unsafe_store(LOWER, (whole & 127).cast[DType.int8]())
        target.unsafe_offset(FACTOR).unsafe_bitcast[Float32]()[] = greatest / GREATEST
        offset_sum(rounded, m)[] = whole.reduce_add() * offset
    return not_finite.reduce_add() == 0


@always_inline
def offset_sum(rounded: FloatPointer, query: Int) -> Pointer[Int32, MutUntrackedOrigin]:
    """Return what the offset of the codes adds to a query's sums."""
    return rounded.unsafe_offset(query * ROUNDED_FLOATS + OFFSET_SUM // 4).unsafe_bitcast[Int32]()


@always_inline
def sum_codes[
    kv_dtype: DType, //, count: Int
](
    v: Pointer[Scalar[kv_dtype], _],
    offsets: IntPointer,
    begin: Int,
    end: Int,
    head_dim: Int,
    padded_dim: Int,
    rounded: FloatPointer,
    acc: FloatPointer,
    fetch: Bool,
    mut prefetcher: Prefetcher,
):
    """Adds the weighted V of entries `[begin, end)` for `count` queries, whose weights are `rounded`, to `acc`."""
    comptime strips = strips_at_once(count)
    var constants = StripConstants[kv_dtype]()
    var d = 0
    while d + strips * STRIP <= head_dim:
        sum_strips[count, strips, True](
            v, constants, offsets, begin, end, d, STRIP, padded_dim, rounded, acc, fetch, prefetcher
        )
        d += strips * STRIP
    while d + STRIP <= head_dim:
        sum_strips[count, 1, True](
            v, constants, offsets, begin, end, d, STRIP, padded_dim, rounded, acc, fetch, prefetcher
        )
        d += STRIP
    if d < head_dim:
        sum_strips[count, 1, False](
            v, constants, offsets, begin, end, d, head_dim - d, padded_dim, rounded, acc, fetch, prefetcher
        )


@always_inline
def sum_strips[
    kv_dtype: DType, //, count: Int, strips: Int, full: Bool
](
    v: Pointer[Scalar[kv_dtype], _],
    constants: StripConstants[kv_dtype],
    offsets: IntPointer,
    begin: Int,
    end: Int,
    d: Int,
    length: Int,
    padded_dim: Int,
    rounded: FloatPointer,
    acc: FloatPointer,
    fetch: Bool,
    mut prefetcher: Prefetcher,
):
    comptime parts = strips * STRIP // LANES
    var upper = Array[IntVector, count * parts](fill=0)
    var lower = Array[IntVector, count * parts](fill=0)
    comptime for m in range(count):
        var offset = IntVector(offset_sum(rounded, m)[])
        comptime for part in range(parts):
            lower[m * parts + part] = -offset
    for first in range(begin, end, STEP_TOKENS):
        if fetch:
            prefetcher.run()
        comptime for strip in range(strips):
            var codes = Array[ByteVector, 2](fill=0)
            load_four[full](v, constants, offsets.unsafe_offset(first), d + strip * STRIP, length, codes)
            comptime for m in range(count):
                var weights = rounded.unsafe_offset(m * ROUNDED_FLOATS).unsafe_bitcast[UInt8]().unsafe_offset(first)
                var high = weights.unsafe_offset(UPPER).unsafe_bitcast[Int32]()[]
                var low = weights.unsafe_offset(LOWER).unsafe_bitcast[Int32]()[]
                comptime for half in range(2):
                    comptime at = m * parts + 2 * strip + half
                    upper[at] = int8_dot[False](upper[at], codes[half], high)
                    lower[at] = int8_dot[False](lower[at], codes[half], low)
    comptime for m in range(count):
        var factor = FloatVector(rounded[unsafe_offset=m * ROUNDED_FLOATS + FACTOR // 4])
        comptime for part in range(parts):
            comptime at = m * parts + part
            var sums = ((upper[at] << 7) + lower[at]).cast[DType.float32]()
            var target = m * padded_dim + d + part * LANES
            acc.unsafe_store(target, sums.fma(factor, acc.unsafe_load[width=LANES](target)))


@always_inline
def load_four[
    dtype: DType, //, full: Bool
](
    v: Pointer[Scalar[dtype], _],
    constants: StripConstants[dtype],
    offsets: IntPointer,
    d: Int,
    length: Int,
    mut codes: Array[ByteVector, 2],
):
    """The codes of a strip of four tokens, plus 128 or 8: lane i has those of its element i, or of the lane order of
    `load_chunk` where two share a byte."""
    var at = Array[Pointer[Scalar[dtype], v.origin], STEP_TOKENS](fill=v)
    comptime for i in range(STEP_TOKENS):
        at[i] = v.unsafe_offset(offsets[unsafe_offset=i] + units_of(dtype, d))
    comptime if dtype == DType.int8:
        var low = load_bits[DType.uint8, full, STRIP](at[0], length).join(
            load_bits[DType.uint8, full, STRIP](at[1], length)
        )
        var high = load_bits[DType.uint8, full, STRIP](at[2], length).join(
            load_bits[DType.uint8, full, STRIP](at[3], length)
        )
        var first = rebind[ByteVector](low)
        var second = rebind[ByteVector](high)
        codes[0] = look_up(first, constants.first, second) ^ constants.offset
        codes[1] = look_up(first, constants.second, second) ^ constants.offset
    else:
        var low = load_pairs[STRIP // 2, full](at[0], length).join(load_pairs[STRIP // 2, full](at[1], length))
        var high = load_pairs[STRIP // 2, full](at[2], length).join(load_pairs[STRIP // 2, full](at[3], length))
        var all = rebind[ByteVector](low.join(high))
        var pairs = permute(all, constants.first) ^ constants.offset
        codes[0] = pairs & constants.second
        codes[1] = bitcast[DType.uint8, 64](bitcast[DType.uint32, LANES](pairs) >> 4) & constants.second


def four_bytes(start: Int, run: Int) -> ByteVector:
    """Byte `start + i` of four runs of `run` bytes, for 16 i in order."""
    var bytes = ByteVector(0)
    for i in range(64):
        bytes[i] = UInt8(i % 4 * run + start + i // 4)
    return bytes
