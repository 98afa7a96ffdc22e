"""The linear layers among the registered ops: the interface between MAX graphs and the kernels. CPU only."""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor, OutputVariadicTensors
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .cache.checks import check_equal, check_rows
from .cache.operands import row_pointer
from .cache.pointers import untracked
from .isa.library_call import call_library
from .isa.threads import workers_of_max
from .linear.call import AdapterCall, ExpertsCall, LinearCall, Member
from .linear.quantised.encodings import ENCODINGS, check_row_bytes, encoding_of, encodings_mask
from .linear.quantised.rows import QuantisedRows


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
        var members = List[Member](capacity=ws.size)
        comptime for i in range(ws.size):
            check_equal("w: its second dimension", ws[i].dim_size(1), k)
            members.append(Member(Int(ys[i].unsafe_ptr()), Int(ws[i].unsafe_ptr()), ws[i].dim_size(0), 0, 0))
        var at = Int(members.unsafe_ptr())
        var call = LinearCall(at, ws.size, Int(x.unsafe_ptr()), x.dim_size(0), k, workers_of_max())
        call_library(String("paged_kv_linear_", dtype, "_", weight_dtype), call)
        _ = members^


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
        var member = Member(Int(y.unsafe_ptr()), Int(w.unsafe_ptr()), w.dim_size(1), 0, 0)
        var members = List[Member](length=1, fill=member)
        var call = ExpertsCall(
            Int(members.unsafe_ptr()),
            1,
            Int(x.unsafe_ptr()),
            Int(experts.unsafe_ptr()),
            rows,
            x.dim_size(0),
            w.dim_size(0),
            x.dim_size(1),
            workers_of_max(),
        )
        call_library(String("paged_kv_experts_", dtype, "_", weight_dtype), call)
        _ = members^


@extensibility.register("paged_kv_adapter_linear")
struct AdapterLinear:
    """Computes `result = y + (x a^T) b`, each row with the a and b of its own adapter out of stacks. CPU only.

    y and result `[M, N]`; x `[M, K]`; a `[E, R, K]`; b `[E, R, N]`; adapters `[M]` int32, -1 for y's own row.
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=2, ...],
        y: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        a: InputTensor[dtype=weight_dtype, rank=3, ...],
        b: InputTensor[dtype=weight_dtype, rank=3, ...],
        adapters: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_adapter_linear runs on the CPU alone")
        check_equal("x: its number of rows", x.dim_size(0), y.dim_size(0))
        check_equal("adapters: its length", adapters.dim_size(0), y.dim_size(0))
        check_equal("a: its third dimension", a.dim_size(2), x.dim_size(1))
        check_equal("b: its third dimension", b.dim_size(2), y.dim_size(1))
        check_equal("b: its second dimension", b.dim_size(1), a.dim_size(1))
        check_equal("b: its first dimension", b.dim_size(0), a.dim_size(0))
        var call = AdapterCall(
            Int(result.unsafe_ptr()),
            Int(y.unsafe_ptr()),
            Int(x.unsafe_ptr()),
            Int(a.unsafe_ptr()),
            Int(b.unsafe_ptr()),
            Int(adapters.unsafe_ptr()),
            y.dim_size(0),
            y.dim_size(1),
            x.dim_size(1),
            a.dim_size(1),
            a.dim_size(0),
            workers_of_max(),
        )
        call_library(String("paged_kv_adapter_linear_", dtype, "_", weight_dtype), call)


@extensibility.register("paged_kv_quantised_linear")
struct QuantisedLinear:
    """Computes `y_i = x w_i^T` for one or more weights in GGUF's blocks (`linear/quantised/README.md`). CPU only.

    x `[M, K]`, w_i uint8 `[N_i, bytes of a row]`, y_i `[M, N_i]` in x's dtype. `encodings` has 5 bits for each weight,
    the first in the lowest: the index of its encoding.
    """

    @staticmethod
    def execute[
        dtype: DType, //, encodings: Int, target: StaticString
    ](
        ys: OutputVariadicTensors[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ws: InputVariadicTensors[dtype=DType.uint8, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_quantised_linear runs on the CPU alone")
        comptime mask = encodings_mask(encodings, ws.size)
        comptime assert mask < 1 << ENCODINGS.length, "an encoding that is not known"
        var k = x.dim_size(1)
        var members = List[Member](capacity=ws.size)
        comptime for i in range(ws.size):
            comptime encoding = encoding_of(encodings, i)
            check_row_bytes(ws[i].dim_size(1), encoding, k)
            members.append(
                Member(
                    Int(ys[i].unsafe_ptr()),
                    Int(ws[i].unsafe_ptr()),
                    ws[i].dim_size(0),
                    ws[i].dim_size(1),
                    encoding,
                )
            )
        var at = Int(members.unsafe_ptr())
        var call = LinearCall(at, ws.size, Int(x.unsafe_ptr()), x.dim_size(0), k, workers_of_max())
        call_library(String("paged_kv_quantised_linear_", dtype, "_", mask), call)
        _ = members^


@extensibility.register("paged_kv_quantised_experts")
struct QuantisedExperts:
    """Computes `y_i[r] = x[r // c] w_i[experts[r]]^T` for one or more stacks in GGUF's blocks. CPU only.

    x `[M, K]`; w_i uint8 `[E, N_i, bytes of a row]`; experts `[R]` int32, R = c M; y_i `[R, N_i]` in x's dtype. A row
    of expert -1 is 0. `encodings` as for `paged_kv_quantised_linear`.
    """

    @staticmethod
    def execute[
        dtype: DType, //, encodings: Int, target: StaticString
    ](
        ys: OutputVariadicTensors[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        experts: InputTensor[dtype=DType.int32, rank=1, ...],
        ws: InputVariadicTensors[dtype=DType.uint8, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_quantised_experts runs on the CPU alone")
        comptime mask = encodings_mask(encodings, ws.size)
        comptime assert mask < 1 << ENCODINGS.length, "an encoding that is not known"
        var k = x.dim_size(1)
        var rows = experts.dim_size(0)
        var count = ws[0].dim_size(0)
        var members = List[Member](capacity=ws.size)
        comptime for i in range(ws.size):
            comptime encoding = encoding_of(encodings, i)
            check_row_bytes(ws[i].dim_size(2), encoding, k)
            check_equal("w: its number of experts", ws[i].dim_size(0), count)
            check_equal("y: its number of rows", ys[i].dim_size(0), rows)
            check_equal("y: its number of columns", ys[i].dim_size(1), ws[i].dim_size(1))
            members.append(
                Member(
                    Int(ys[i].unsafe_ptr()),
                    Int(ws[i].unsafe_ptr()),
                    ws[i].dim_size(1),
                    ws[i].dim_size(2),
                    encoding,
                )
            )
        var call = ExpertsCall(
            Int(members.unsafe_ptr()),
            ws.size,
            Int(x.unsafe_ptr()),
            Int(experts.unsafe_ptr()),
            rows,
            x.dim_size(0),
            count,
            k,
            workers_of_max(),
        )
        call_library(String("paged_kv_quantised_experts_", dtype, "_", mask), call)
        _ = members^


@extensibility.register("paged_kv_quantised_rows")
struct QuantisedRowsLayer:
    """`y[i] = w[rows[i]]` in float32, of weights in GGUF's blocks. CPU only.

    w uint8 `[N, bytes of a row]`; rows `[T]` int32; y `[T, K]`. `encoding` is the index of w's.
    """

    @staticmethod
    def execute[
        encoding: Int, target: StaticString
    ](
        y: OutputTensor[dtype=DType.float32, rank=2, ...],
        w: InputTensor[dtype=DType.uint8, rank=2, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_quantised_rows runs on the CPU alone")
        check_equal("y: its number of rows", y.dim_size(0), rows.dim_size(0))
        check_row_bytes(w.dim_size(1), encoding, y.dim_size(1))
        var bytes = untracked(w.unsafe_ptr())
        check_rows(row_pointer(rows), rows.dim_size(0), w.dim_size(0))
        var chosen = QuantisedRows(
            untracked(y.unsafe_ptr()), bytes, row_pointer(rows), rows.dim_size(0), y.dim_size(1), w.dim_size(1)
        )
        var workers = parallelism_level(None)
        comptime assert encoding < ENCODINGS.length, "an encoding that is not known"
        comptime for i in range(ENCODINGS.length):
            comptime if encoding == i:
                chosen.unpack[ENCODINGS[i]](workers)
