"""Linear layer on the CPU, `y = x w^T`: matrix tiles or dot products for bfloat16 over bfloat16 where the CPU has them,
else vectors."""

from ..isa.amx import HAS_AMX, amx_permitted
from ..isa.bf16_dot import USES_BF16_DOT
from .amx.blocks import linear_amx
from .bf16_dot import linear_bf16_dot
from .vectors import linear_vectors


def linear[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    m: Int,
    n: Int,
    k: Int,
    workers: Int,
):
    """Computes `y = x w^T`: y `[m, n]`, x `[m, k]`, w `[n, k]`. The result does not depend on `workers`."""
    comptime if HAS_AMX and dtype == DType.bfloat16 and weight_dtype == DType.bfloat16:
        if amx_permitted():
            linear_amx(
                y.unsafe_bitcast[BFloat16](),
                x.unsafe_bitcast[BFloat16](),
                w.unsafe_bitcast[BFloat16](),
                m,
                n,
                k,
                workers,
            )
            return
    comptime if USES_BF16_DOT and dtype == DType.bfloat16 and weight_dtype == DType.bfloat16:
        linear_bf16_dot(
            y.unsafe_bitcast[BFloat16](), x.unsafe_bitcast[BFloat16](), w.unsafe_bitcast[BFloat16](), m, n, k, workers
        )
        return
    linear_vectors(y, x, w, m, n, k, workers)
