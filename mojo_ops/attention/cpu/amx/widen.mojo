"""Stored bfloat16 and float8 elements as bfloat16, one chunk at a time, in the order that takes the fewest shuffles."""

from std.utils import IndexList

from ....isa.convert import load_bits
from ....isa.float8 import Bf16Words, float8_word_order, float8_words


struct Bf16Chunk[dtype: DType]:
    """The bfloat16 bits of one chunk: a cache line of `dtype`."""

    comptime length = 32 if Self.dtype == DType.bfloat16 else 64
    var words: Array[Bf16Words, Self.length // 32]

    def __init__(out self):
        self.words = Array[Bf16Words, Self.length // 32](fill=0)


@always_inline
def widen_chunk[
    dtype: DType, //, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int, mut target: Bf16Chunk[dtype]):
    """Loads the chunk at `source`; unless `full`, only its first `count` elements, then zeros."""
    comptime if dtype == DType.bfloat16:
        target.words[0] = load_bits[DType.uint16, full, 32](source, count)
    else:
        var bytes = load_bits[DType.uint8, full, 64](source, count)
        target.words[0], target.words[1] = float8_words[dtype](bytes)


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
