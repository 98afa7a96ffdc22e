"""Stored bfloat16 and float8 elements as bfloat16, one chunk at a time, in the order that takes the fewest shuffles."""

from ...isa.convert import load_bits
from ...isa.float8 import Bf16Words, Float8Tables, float8_word_order, float8_words


struct Bf16Chunk[dtype: DType]:
    """The bfloat16 bits of one chunk: a cache line of `dtype`."""

    comptime length = 32 if Self.dtype == DType.bfloat16 else 64
    var words: Array[Bf16Words, Self.length // 32]

    def __init__(out self):
        self.words = Array[Bf16Words, Self.length // 32](fill=0)


@always_inline
def widen_chunk[
    dtype: DType, //, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int, tables: Float8Tables[dtype], mut target: Bf16Chunk[dtype]):
    """Loads the chunk at `source`; unless `full`, only its first `count` elements, then zeros."""
    comptime if dtype == DType.bfloat16:
        target.words[0] = load_bits[DType.uint16, full, 32](source, count)
    else:
        var bytes = load_bits[DType.uint8, full, 64](source, count)
        target.words[0], target.words[1] = float8_words(bytes, tables)


@always_inline
def query_words[kv_dtype: DType, part: Int](source: Pointer[UInt16, _], count: Int) -> Bf16Words:
    """Words `part * 32` and on of a query, in the element order of a `kv_dtype` chunk; zeros past the first `count`."""
    comptime if kv_dtype == DType.bfloat16:
        return load_bits[DType.uint16, False, 32](source, count)
    else:
        var all = load_bits[DType.uint16, False, 32](source, count).join(
            load_bits[DType.uint16, False, 32](source.unsafe_offset(32), count - 32)
        )
        return rebind[Bf16Words](all.shuffle[mask=float8_word_order()](all).slice[32, offset=32 * part]())
