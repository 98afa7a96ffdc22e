"""Chunks of stored elements in their lane order, sums of vectors, and the look-up tables of float8 and of codes."""

from std.math import iota
from std.memory import bitcast
from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.isa.convert import (
    ChunkConstants,
    FloatVector,
    LANES,
    chunk_of,
    load_chunk,
    narrow,
    reduce_each,
    to_chunk_order,
    to_natural_order,
)
from mojo_ops.attention.cpu.bf16_chunk import Bf16Chunk, widen_chunk
from mojo_ops.isa.bf16_lookup import is_looked_up, lookup_table_of, word_order
from support import untracked


def check_order[dtype: DType]() raises:
    """Bf16Pointer that are loaded and put back into their natural order are the elements, whole chunks and parts."""
    comptime chunk = chunk_of(dtype)
    var constants = ChunkConstants[dtype]()
    var stored = List[Scalar[dtype]](length=chunk, fill=0)
    for i in range(chunk):
        stored[i] = Scalar[dtype](Float32(i % 13 - 6) / 4)
    var whole = to_natural_order[dtype](load_chunk[True](untracked(stored), chunk, constants))
    var part = to_natural_order[dtype](load_chunk[False](untracked(stored), chunk - 8, constants))
    var natural = SIMD[DType.float32, chunk](0)
    for i in range(chunk):
        var expected = stored[i].cast[DType.float32]()
        natural[i] = expected
        assert_equal(whole[i], expected)
        assert_equal(part[i], expected if i < chunk - 8 else 0)
    assert_equal(to_chunk_order[dtype](natural), load_chunk[True](untracked(stored), chunk, constants))
    _ = stored^


def test_order() raises:
    check_order[DType.float32]()
    check_order[DType.float16]()
    check_order[DType.bfloat16]()
    check_order[DType.float8_e4m3fn]()
    check_order[DType.float8_e5m2]()


def check_bytes[dtype: DType]() raises:
    """Every float8 is the number that a cast makes it."""
    comptime chunk = chunk_of(dtype)
    var constants = ChunkConstants[dtype]()
    var stored = List[Scalar[dtype]](length=256, fill=0)
    for i in range(256):
        untracked(stored).unsafe_mut_cast[True]().unsafe_bitcast[UInt8]()[unsafe_offset=i] = UInt8(i)
    for start in range(0, 256, chunk):
        var wide = to_natural_order[dtype](load_chunk[True](untracked(stored).unsafe_offset(start), chunk, constants))
        for i in range(chunk):
            var expected = stored[start + i].cast[DType.float32]()
            if expected != expected:
                assert_true(wide[i] != wide[i])
            else:
                assert_equal(wide[i], expected)
    _ = stored^


def test_narrow_rounds_to_even() raises:
    """Every bfloat16 comes back, the middle of two neighbours goes to the even one, and NaN stays NaN.

    Subnormal numbers are left out: AVX-512's instruction makes them 0.
    """
    for high in range(0, 1 << 16, LANES):
        var upper = iota[DType.uint32, LANES](UInt32(high))
        var exponent = upper & 0x7F80
        var is_nan = exponent.eq(0x7F80) & (upper & 0x7F).ne(0)
        var finite = exponent.ne(0x7F80) & exponent.ne(0)
        var exact = narrowed(upper << 16)
        assert_true((exact.eq(upper) | is_nan | exponent.eq(0)).reduce_and(), String(high))
        assert_true((narrowed(upper << 16 | 0x8000).eq(upper + (upper & 1)) | ~finite).reduce_and(), String(high))
        assert_true((narrowed(upper << 16 | 0x7FFF).eq(upper) | ~finite).reduce_and(), String(high))
        assert_true((narrowed(upper << 16 | 0x8001).eq(upper + 1) | ~finite).reduce_and(), String(high))
        # A NaN of any payload, even one that the upper half does not hold.
        var payload = narrowed(upper << 16 | 1)
        assert_true(((payload & 0x7FFF).gt(0x7F80) | exponent.ne(0x7F80)).reduce_and(), String(high))


def narrowed(bits: SIMD[DType.uint32, LANES]) -> SIMD[DType.uint32, LANES]:
    """The bits of bfloat16, from the bits of float32."""
    var rounded = narrow[DType.bfloat16](bitcast[DType.float32, LANES](bits))
    return bitcast[DType.uint16, LANES](rounded).cast[DType.uint32]()


def test_every_float8() raises:
    check_bytes[DType.float8_e4m3fn]()
    check_bytes[DType.float8_e5m2]()


def check_sum_each[lanes: Int]() raises:
    var x = Array[SIMD[DType.float32, lanes], lanes](fill=0)
    for i in range(lanes):
        for lane in range(lanes):
            x[i][lane] = Float32(100 * i + lane)
    var sums = reduce_each[lanes](x)
    for i in range(lanes):
        assert_equal(sums[i], Float32(100 * i * lanes + lanes * (lanes - 1) // 2))


def test_sum_each() raises:
    check_sum_each[4]()
    check_sum_each[8]()
    check_sum_each[16]()


def check_table[dtype: DType]() raises:
    for half in range(2):
        var low = lookup_table_of(dtype, 64 * half, 0)
        var high = lookup_table_of(dtype, 64 * half, 8)
        for i in range(64):
            var bits = UInt16(low[i]) | (UInt16(high[i]) << 8)
            var found = bitcast[DType.bfloat16](bits).cast[DType.float32]()
            var expected = bitcast[dtype](UInt8(64 * half + i)).cast[DType.float32]()
            if dtype == DType.int8 and expected == 0:
                expected = 128
            assert_true(
                found == expected or (found != found and expected != expected), String(dtype, " ", 64 * half + i)
            )


def test_every_float8_magnitude() raises:
    check_table[DType.float8_e4m3fn]()
    check_table[DType.float8_e5m2]()
    check_table[DType.int8]()


def check_codes[dtype: DType]() raises:
    """Every code, in both of the ways in which a chunk is loaded: as float32, and as bfloat16 where it is looked up."""
    comptime chunk = chunk_of(dtype)
    comptime length = chunk // 2 if dtype == DType.uint8 else chunk
    var constants = ChunkConstants[dtype]()
    for start in range(-128, 128, chunk):
        var codes = List[Int](length=chunk, fill=0)
        var stored = List[Scalar[dtype]](length=length, fill=0)
        for i in range(chunk):
            codes[i] = i % 16 - 8 if dtype == DType.uint8 else min(start + i, 127)
        for i in range(length):
            comptime if dtype == DType.uint8:
                stored[i] = Scalar[dtype](codes[2 * i] & 15 | (codes[2 * i + 1] & 15) << 4)
            else:
                stored[i] = Scalar[dtype](codes[i])
        for count in range(8, chunk + 1, 8):
            var wide = load_chunk[False](untracked(stored), count, constants)
            if count == chunk:
                assert_equal(load_chunk[True](untracked(stored), count, constants), wide)
            var natural = to_natural_order[dtype](wide)
            for i in range(chunk):
                assert_equal(natural[i], Float32(codes[i] if i < count else 0))
            comptime if is_looked_up(dtype):
                var words = Bf16Chunk[dtype]()
                widen_chunk[False](untracked(stored), count, constants.tables, words)
                comptime order = word_order(dtype)
                comptime for i in range(chunk):
                    comptime element = order[i]
                    var found = bitcast[DType.bfloat16](words.words[i // 32][i % 32]).cast[DType.float32]()
                    assert_equal(found, Float32(codes[element] if element < count else 0))
        _ = stored^


def test_every_code() raises:
    check_codes[DType.int8]()
    check_codes[DType.uint8]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
