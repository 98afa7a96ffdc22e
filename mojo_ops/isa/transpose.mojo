"""Transposes in registers."""


@always_inline
def transpose_16x16[dtype: DType, //](mut rows: Array[SIMD[dtype, 16], 16]):
    """Transposes 16 x 16 elements in place, by four perfect shuffles of all 256."""
    comptime for _ in range(4):
        var shuffled = Array[SIMD[dtype, 16], 16](fill=0)
        comptime for i in range(8):
            var pair = rows[i].interleave(rows[i + 8])
            shuffled[2 * i] = pair.slice[16]()
            shuffled[2 * i + 1] = pair.slice[16, offset=16]()
        comptime for i in range(16):
            rows[i] = shuffled[i]
