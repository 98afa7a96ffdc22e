"""Stored elements as float32 vectors: `CHUNK` elements at a time, in whatever order is cheapest.

A chunk becomes two vectors of `HALF` lanes. For bfloat16 these are the even and the odd elements (a shift and a mask),
for the other types the first and the second half. Queries are packed in the same order and outputs unpacked from it, so
that nobody else knows.
"""

from std.memory import bitcast
from std.utils import IndexList

comptime HALF = 16
comptime CHUNK = 2 * HALF
comptime Vec = SIMD[DType.float32, HALF]


@fieldwise_init
struct Pair(TrivialRegisterPassable):
    """The two vectors of one chunk."""

    var a: Vec
    var b: Vec


@always_inline
def load_chunk[dtype: DType, //, full: Bool](source: Pointer[Scalar[dtype], _], count: Int) -> Pair:
    """The chunk at `source`: `CHUNK` elements, or where not `full` only the first `count`, then zeros.

    Nothing past `count` is read: it may be another head's, and NaN.
    """
    comptime if dtype == DType.bfloat16:
        var bits = load_bits[DType.uint16, full](source, count)
        var pairs = bitcast[DType.uint32, HALF](bits)
        return Pair(bitcast[DType.float32, HALF](pairs << 16), bitcast[DType.float32, HALF](pairs & 0xFFFF0000))
    elif dtype == DType.float8_e4m3fn or dtype == DType.float8_e5m2:
        var bits = load_bits[DType.uint8, full](source, count)
        return Pair(widen_fp8[dtype](bits.slice[HALF, offset=0]()), widen_fp8[dtype](bits.slice[HALF, offset=HALF]()))
    else:
        comptime if full:
            return Pair(
                source.unsafe_load[width=HALF]().cast[DType.float32](),
                source.unsafe_load[width=HALF](HALF).cast[DType.float32](),
            )
        else:
            comptime bits_type = DType.uint16 if dtype == DType.float16 else DType.uint32
            var bits = load_bits[bits_type, full](source, count)
            var values = bitcast[dtype, CHUNK](bits)
            return Pair(
                values.slice[HALF, offset=0]().cast[DType.float32](),
                values.slice[HALF, offset=HALF]().cast[DType.float32](),
            )


@always_inline
def load_bits[
    dtype: DType, //, out_type: DType, full: Bool, length: Int = CHUNK
](source: Pointer[Scalar[dtype], _], count: Int) -> SIMD[out_type, length]:
    """The bits of `length` elements; where not `full` only of the first `count`, then zeros."""
    var raw = source.unsafe_bitcast[Scalar[out_type]]()
    comptime if full:
        return raw.unsafe_load[width=length]()
    else:
        var out = SIMD[out_type, length](0)
        comptime for i in range(length // 8):
            if 8 * i < count:
                out = out.insert[offset=8 * i](raw.unsafe_load[width=8](8 * i))
        return out


@always_inline
def widen_fp8[dtype: DType](bits: SIMD[DType.uint8, HALF]) -> Vec:
    """Float32 of 16 float8 numbers, by way of float16 whose exponent holds theirs."""
    var wide = bits.cast[DType.uint16]()
    comptime if dtype == DType.float8_e5m2:
        return bitcast[DType.float16, HALF](wide << 8).cast[DType.float32]()
    else:
        # seeeemmm -> s0eeeemmm0000000: the exponent bias is 7 there and 15 here.
        var half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        var value = bitcast[DType.float16, HALF](half).cast[DType.float32]() * 256
        return (wide & 0x7F).eq(0x7F).select(Vec(0) / Vec(0), value)


@always_inline
def pack[kv_dtype: DType](x: SIMD[DType.float32, CHUNK]) -> Pair:
    """Elements in their natural order, as the lanes of a `kv_dtype` chunk."""
    comptime if kv_dtype == DType.bfloat16:
        var halves = x.deinterleave()
        return Pair(rebind[Vec](halves[0]), rebind[Vec](halves[1]))
    else:
        return Pair(x.slice[HALF, offset=0](), x.slice[HALF, offset=HALF]())


@always_inline
def unpack[kv_dtype: DType](pair: Pair) -> SIMD[DType.float32, CHUNK]:
    """The elements of a chunk in their natural order."""
    comptime if kv_dtype == DType.bfloat16:
        return rebind[SIMD[DType.float32, CHUNK]](pair.a.interleave(pair.b))
    else:
        return rebind[SIMD[DType.float32, CHUNK]](pair.a.join(pair.b))


@always_inline
def sum_each(x: Array[Vec, HALF]) -> Vec:
    """Lane `i` is the sum of the lanes of `x[i]`: 15 additions instead of 16 times 4.

    Each round adds halves of shrinking groups of lanes, in shuffles that have an instruction of their own; `placed`
    undoes the order that they leave.
    """
    var y = Array[Vec, HALF](fill=0)
    comptime for i in range(8):
        comptime a = placed(i)
        comptime b = placed(i + 8)
        y[i] = x[a].shuffle[mask=halves_mask(8, 0)](x[b]) + x[a].shuffle[mask=halves_mask(8, 8)](x[b])
    comptime for step in range(3):
        comptime width = 4 >> step
        comptime for i in range(width):
            comptime low = fold_mask(width, 0)
            comptime high = fold_mask(width, width)
            y[i] = y[i].shuffle[mask=low](y[i + width]) + y[i].shuffle[mask=high](y[i + width])
    return y[0]


def placed(i: Int) -> Int:
    """The vector whose sum the rounds leave in lane `i`: bits 0 and 1 change places, and bits 2 and 3."""
    return (i & 5) << 1 | (i & 10) >> 1


def halves_mask(width: Int, shift: Int) -> IndexList[HALF]:
    """`width` lanes of the first operand from `shift` on, then of the second."""
    var mask = IndexList[HALF]()
    for lane in range(HALF):
        mask[lane] = shift + lane % width + lane // width * HALF
    return mask


def fold_mask(width: Int, shift: Int) -> IndexList[HALF]:
    """Of every run of `2 * width` lanes its half from `shift` on: within 4 lanes, or all 16 where that is as many or more.

    The first operand's come first, then the second's.
    """
    var span = HALF if width >= 4 else 4
    var half = span // 2
    var mask = IndexList[HALF]()
    for lane in range(HALF):
        var start = lane // span * span
        var i = lane % half
        mask[lane] = start + i // width * 2 * width + i % width + shift + (lane % span // half) * HALF
    return mask
