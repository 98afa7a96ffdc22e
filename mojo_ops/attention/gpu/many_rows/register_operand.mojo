"""Products whose first operand, the weights, is in registers."""

from std.memory import bitcast
from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly
from max.gpu.compute.mma import WGMMADescriptor

comptime Fragment = SIMD[DType.float32, 32]
"""A thread's numbers of a result `[64, 64]`."""


@always_inline
def packed[dtype: DType](weights: Fragment, step: Int) -> SIMD[DType.uint32, 4]:
    """A thread's registers of A, `[64, 16 tokens from 16 * step on]`, in two 16-bit numbers each.

    They are the numbers that the thread holds of the scores, in their order: elements `8 * step` to `8 * step + 7`.
    """
    var registers = SIMD[DType.uint32, 4](0)
    comptime for j in range(4):
        var pair = SIMD[DType.float32, 2](weights[8 * step + 2 * j], weights[8 * step + 2 * j + 1])
        registers[j] = bitcast[DType.uint32, 1](pair.cast[dtype]())
    return registers


@always_inline
def pin_operand(mut registers: SIMD[DType.uint32, 4]):
    """As `pin_results`, for registers of A: a conversion after the fence would make products wait for each other."""
    comptime for i in range(4):
        registers[i] = inlined_assembly["// pinned $0", UInt32, constraints="=r,0", has_side_effect=True](registers[i])


@always_inline
def advanced[dtype: DType](operand: WGMMADescriptor[dtype], bytes: Int) -> WGMMADescriptor[dtype]:
    """The operand that begins so many bytes later: a sum in the low half alone, which cannot overflow into the other."""
    var low = UInt32(operand.desc & 0xFFFFFFFF) + UInt32(bytes >> 4)
    return WGMMADescriptor[dtype]((operand.desc >> 32 << 32) | Int64(low))


@always_inline
def pinned(x: Int) -> Int:
    """The same number, of which the compiler does not know that it is: what is computed from it is not kept for later."""
    return Int(inlined_assembly["// pinned $0", UInt32, constraints="=r,0", has_side_effect=True](UInt32(x)))


@always_inline
def add_product[dtype: DType](mut sums: Fragment, a: SIMD[DType.uint32, 4], b: WGMMADescriptor[dtype]):
    """Starts `sums [64, 64 dims] += a [64, 16] b`, with the dims of b adjacent.

    Float16 as well as bfloat16, which is all that the library's `wgmma_async` takes with A in registers.
    """
    comptime assert dtype == DType.bfloat16 or dtype == DType.float16, "16-bit operands"
    comptime kind = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    # fmt: off
    comptime F = Float32
    var r = inlined_assembly[
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." + kind + " {$0, $1, $2, $3, "
        "$4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, "
        "$27, $28, $29, $30, $31}, {$32, $33, $34, $35}, $36, p, 1, 1, 1;\n}",
        _RegisterPackType[
            F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F
        ],
        constraints="=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,"
        "r,r,r,r,l,"
        "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
        has_side_effect=True,
    ](
        a[0], a[1], a[2], a[3], b.desc,
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7],
        sums[8], sums[9], sums[10], sums[11], sums[12], sums[13], sums[14], sums[15],
        sums[16], sums[17], sums[18], sums[19], sums[20], sums[21], sums[22], sums[23],
        sums[24], sums[25], sums[26], sums[27], sums[28], sums[29], sums[30], sums[31],
    )
    # fmt: on
    comptime for i in range(32):
        sums[i] = r[i]
