"""Linear layers of one x on the CPU, `y_i = x w_i^T`: q, k and v, or gate and up, or one alone.

Matrix tiles or dot products for bfloat16 over bfloat16 where the CPU has them, else vectors. Each y is bit by bit what
its layer alone computes.
"""

from ..isa.amx import HAS_AMX, amx_permitted
from ..isa.bf16_dot import USES_BF16_DOT
from .amx.blocks import linear_amx
from .bf16_dot import linear_bf16_dot
from .member import LinearMember
from .vectors import linear_vectors
from ..isa.threads import Workers


def linear[
    dtype: DType, weight_dtype: DType, //
](
    members: Pointer[LinearMember[dtype, weight_dtype], MutUntrackedOrigin],
    count: Int,
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Workers,
):
    """Computes the `y = x w^T` of `count` members: x `[m, k]`. The result does not depend on `workers`."""
    comptime all_bfloat16 = dtype == DType.bfloat16 and weight_dtype == DType.bfloat16
    comptime if HAS_AMX and all_bfloat16:
        if amx_permitted():
            for i in range(count):
                linear_amx(
                    members[unsafe_offset=i].y.unsafe_bitcast[BFloat16](),
                    x.unsafe_bitcast[BFloat16](),
                    members[unsafe_offset=i].w.unsafe_bitcast[BFloat16](),
                    m,
                    members[unsafe_offset=i].n,
                    k,
                    workers,
                )
            return
    comptime if USES_BF16_DOT and all_bfloat16:
        linear_bf16_dot(
            members.unsafe_bitcast[LinearMember[DType.bfloat16, DType.bfloat16]](),
            count,
            x.unsafe_bitcast[BFloat16](),
            m,
            k,
            workers,
        )
        return
    for i in range(count):
        linear_vectors(
            members[unsafe_offset=i].y, x, members[unsafe_offset=i].w, m, members[unsafe_offset=i].n, k, workers
        )
