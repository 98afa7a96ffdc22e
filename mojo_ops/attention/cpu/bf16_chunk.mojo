"""Stored bfloat16, float8, int8 and int4 elements as bfloat16, one chunk at a time, in the order of fewest shuffles."""

from ...isa.convert import load_bits, load_pairs
from ...isa.bf16_lookup import Bf16Words, LookupTables, bf16_words, int4_words, word_order


struct Bf16Chunk[dtype: DType]:
    """The bfloat16 bits of one chunk: 32 elements of bfloat16, 64 of other types."""

    comptime length = 32 if Self.dtype == DType.bfloat16 else 64
    var words: Array[Bf16Words, Self.length // 32]

    def __init__(out self):
        self.words = Array[Bf16Words, Self.length // 32](fill=0)


@always_inline
def widen_chunk[
    dtype: DType, //, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int, tables: LookupTables[dtype], mut target: Bf16Chunk[dtype]):
    """Loads the chunk at `source`; unless `full`, only its first `count` elements, then zeros."""
    comptime if dtype == DType.bfloat16:
        target.words[0] = load_bits[DType.uint16, full, 32](source, count)
    elif dtype == DType.uint8:
        var pairs = load_pairs[32, full](source, count).cast[DType.uint16]()
        target.words[0], target.words[1] = int4_words(pairs, rebind[LookupTables[DType.uint8]](tables))
    else:
        var bytes = load_bits[DType.uint8, full, 64](source, count)
        target.words[0], target.words[1] = bf16_words(bytes, tables)


@always_inline
def query_words[kv_dtype: DType, part: Int](source: Pointer[UInt16, _], count: Int) -> Bf16Words:
    """Words `part * 32` and on of a query, in the element order of a `kv_dtype` chunk; zeros past the first `count`."""
    comptime if kv_dtype == DType.bfloat16:
        return load_bits[DType.uint16, False, 32](source, count)
    else:
        var all = load_bits[DType.uint16, False, 32](source, count).join(
            load_bits[DType.uint16, False, 32](source.unsafe_offset(32), count - 32)
        )
        return rebind[Bf16Words](all.shuffle[mask=word_order(kv_dtype)](all).slice[32, offset=32 * part]())
