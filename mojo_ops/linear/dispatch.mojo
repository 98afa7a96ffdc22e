"""Linear layers of one x on the CPU, `y_i = x w_i^T`: q, k and v, or gate and up, or one alone.

Matrix tiles or dot products for bfloat16 over bfloat16 where the CPU has them, else vectors. Each y is bit by bit what
its layer alone computes.
"""

from ..cache.pointers import untracked
from ..isa.amx import HAS_AMX, amx_permitted
from ..isa.bf16_dot import USES_BF16_DOT
from .amx.blocks import linear_amx
from .bf16_dot import linear_bf16_dot
from .member import LinearMember
from .vectors import linear_vectors


def linear[
    dtype: DType, weight_dtype: DType, count: Int, //
](
    members: Array[LinearMember[dtype, weight_dtype], count],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Int,
):
    """Computes every member's `y = x w^T`: x `[m, k]`. The result does not depend on `workers`."""
    comptime all_bfloat16 = dtype == DType.bfloat16 and weight_dtype == DType.bfloat16
    comptime if HAS_AMX and all_bfloat16:
        if amx_permitted():
            for i in range(count):
                linear_amx(
                    members[i].y.unsafe_bitcast[BFloat16](),
                    x.unsafe_bitcast[BFloat16](),
                    members[i].w.unsafe_bitcast[BFloat16](),
                    m,
                    members[i].n,
                    k,
                    workers,
                )
            return
    comptime if USES_BF16_DOT and all_bfloat16:
        var all = untracked(Pointer(to=members[0]).unsafe_mut_cast[True]())
        linear_bf16_dot(
            all.unsafe_bitcast[LinearMember[DType.bfloat16, DType.bfloat16]](),
            count,
            x.unsafe_bitcast[BFloat16](),
            m,
            k,
            workers,
        )
        _ = members
        return
    for i in range(count):
        linear_vectors(members[i].y, x, members[i].w, m, members[i].n, k, workers)
