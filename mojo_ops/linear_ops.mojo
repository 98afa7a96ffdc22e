"""The linear layers among the registered ops: the interface between MAX graphs and the kernels. CPU only."""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor, OutputVariadicTensors
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .cache.checks import check_equal
from .cache.operands import row_pointer
from .cache.pointers import untracked
from .linear.dispatch import linear
from .linear.experts import check_experts, linear_experts
from .linear.member import LinearMember


@extensibility.register("paged_kv_linear")
struct LinearLayer:
    """Computes `y_i = x w_i^T` for one or more weights, as checkpoints store them. CPU only.

    x `[M, K]`, w_i `[N_i, K]`, y_i `[M, N_i]` in x's dtype.
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString
    ](
        ys: OutputVariadicTensors[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ws: InputVariadicTensors[dtype=weight_dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_linear runs on the CPU alone; a GPU has MAX's own matmul")
        var k = x.dim_size(1)
        var members = Array[LinearMember[dtype, weight_dtype], ws.size](uninitialized=True)
        comptime for i in range(ws.size):
            check_equal("w: its second dimension", ws[i].dim_size(1), k)
            members[i] = LinearMember(untracked(ys[i].unsafe_ptr()), untracked(ws[i].unsafe_ptr()), ws[i].dim_size(0))
        linear(members, untracked(x.unsafe_ptr()), x.dim_size(0), k, parallelism_level(None))


@extensibility.register("paged_kv_expert_linear")
struct ExpertLinear:
    """Computes `y[r] = x[r // c] w[experts[r]]^T`: each row has a weight of its own out of a stack. CPU only.

    x `[M, K]`; w `[E, N, K]`; experts `[R]` int32, R = c M; y `[R, N]` in x's dtype. A row of expert -1 is 0.
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        w: InputTensor[dtype=weight_dtype, rank=3, ...],
        experts: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_expert_linear runs on the CPU alone")
        var rows = experts.dim_size(0)
        check_equal("w: its third dimension", w.dim_size(2), x.dim_size(1))
        check_equal("y: its number of rows", y.dim_size(0), rows)
        check_equal("y: its number of columns", y.dim_size(1), w.dim_size(1))
        check_experts(row_pointer(experts), rows, x.dim_size(0), w.dim_size(0))
        linear_experts(
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(w.unsafe_ptr()),
            row_pointer(experts),
            rows,
            x.dim_size(0),
            w.dim_size(0),
            w.dim_size(1),
            x.dim_size(1),
            parallelism_level(None),
        )
