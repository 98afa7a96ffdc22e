"""Linear layers as numbers: what an op hands to a library of kernels, and a program that calls one by itself."""

from ..cache.checks import check_rows
from ..cache.pointers import constant_at, memory_at, untracked
from ..isa.call_layout import AddressOf
from ..isa.threads import Workers
from .adapters import AdapterLinear
from .dispatch import linear
from .experts import check_experts, linear_experts
from .member import LinearMember
from .quantised.encodings import ENCODINGS
from .quantised.product import QuantisedMember, linear_quantised, linear_quantised_experts
from .quantised.rows import QuantisedRows


@fieldwise_init
struct Member(TrivialRegisterPassable):
    """The weights of one of several layers of the same x, and its result."""

    var y: Int
    """`[m, n]`."""
    var w: Int
    """`[n, k]`, or `[n, row_bytes]` in blocks."""
    var n: Int
    var row_bytes: Int
    """Bytes of a row of weights in blocks."""
    var encoding: Int
    """The index of the encoding of weights in blocks."""


@fieldwise_init
struct LinearCall(TrivialRegisterPassable):
    """`y_i = x w_i^T` of `count` members: x `[m, k]`."""

    var members: AddressOf[Member]
    """`count` of them."""
    var count: Int
    var x: Int
    var m: Int
    var k: Int
    var workers: Workers

    def run[dtype: DType, weight_dtype: DType](self):
        """Computes them on the CPU."""
        var members = List[LinearMember[dtype, weight_dtype]](capacity=self.count)
        for i in range(self.count):
            var member = self.members[i]
            members.append({memory_at[dtype](member.y), memory_at[weight_dtype](member.w), member.n})
        linear(untracked(members.unsafe_ptr()), self.count, memory_at[dtype](self.x), self.m, self.k, self.workers)
        _ = members^

    def run_quantised[dtype: DType, mask: Int](self):
        """Computes them on the CPU, of weights in blocks of the encodings of `mask`."""
        var members = quantised_members[dtype](self.members, self.count)
        linear_quantised[mask](
            untracked(members.unsafe_ptr()), self.count, memory_at[dtype](self.x), self.m, self.k, self.workers
        )
        _ = members^


@fieldwise_init
struct ExpertsCall(TrivialRegisterPassable):
    """`y_i[r] = x[r // (rows / m)] w_i[experts[r]]^T` of `count` members, 0 where the expert is -1: x `[m, k]`."""

    var members: AddressOf[Member]
    """`count` of them, whose w is a stack of weights."""
    var count: Int
    var x: Int
    var experts: Int
    """The address of `[rows]` int32."""
    var rows: Int
    var m: Int
    var num_experts: Int
    var k: Int
    var workers: Workers

    def run[dtype: DType, weight_dtype: DType](self) raises:
        """Computes them on the CPU."""
        var experts = constant_at[DType.int32](self.experts)
        check_experts(experts, self.rows, self.m, self.num_experts)
        for i in range(self.count):
            var member = self.members[i]
            linear_experts(
                memory_at[dtype](member.y),
                memory_at[dtype](self.x),
                memory_at[weight_dtype](member.w),
                experts,
                self.rows,
                self.m,
                self.num_experts,
                member.n,
                self.k,
                self.workers,
            )

    def run_quantised[dtype: DType, mask: Int](self) raises:
        """Computes them on the CPU, of weights in blocks of the encodings of `mask`."""
        var experts = constant_at[DType.int32](self.experts)
        check_experts(experts, self.rows, self.m, self.num_experts)
        var members = quantised_members[dtype](self.members, self.count)
        linear_quantised_experts[mask](
            untracked(members.unsafe_ptr()),
            self.count,
            memory_at[dtype](self.x),
            experts,
            self.rows,
            self.m,
            self.num_experts,
            self.k,
            self.workers,
        )
        _ = members^


@fieldwise_init
struct QuantisedRowsCall(TrivialRegisterPassable):
    """`y[i] = w[rows[i]]` in float32, of weights in blocks."""

    var y: Int
    """`[count, k]`."""
    var w: Int
    """`[available, row_bytes]`."""
    var rows: Int
    """The address of `[count]` int32."""
    var count: Int
    var k: Int
    var row_bytes: Int
    var available: Int
    var encoding: Int
    var workers: Workers

    def run[mask: Int](self) raises:
        """Computes them on the CPU, of weights of one of the encodings of `mask`."""
        var bytes = memory_at[DType.uint8](self.w)
        var rows = constant_at[DType.int32](self.rows)
        check_rows(rows, self.count, self.available)
        var chosen = QuantisedRows(memory_at[DType.float32](self.y), bytes, rows, self.count, self.k, self.row_bytes)
        comptime for i in range(ENCODINGS.length):
            comptime if mask >> i & 1 == 1:
                if self.encoding == i:
                    chosen.unpack[ENCODINGS[i]](self.workers)


def quantised_members[dtype: DType](members: AddressOf[Member], count: Int) -> List[QuantisedMember[dtype]]:
    """The members of weights in blocks."""
    var found = List[QuantisedMember[dtype]](capacity=count)
    for i in range(count):
        var member = members[i]
        found.append(
            {
                memory_at[dtype](member.y),
                memory_at[DType.uint8](member.w),
                member.n,
                member.row_bytes,
                member.encoding,
            }
        )
    return found^


@fieldwise_init
struct AdapterCall(TrivialRegisterPassable):
    """`AdapterLinear`."""

    var result: Int
    var y: Int
    var x: Int
    var a: Int
    var b: Int
    var adapters: Int
    """The address of `[m]` int32."""
    var m: Int
    var n: Int
    var k: Int
    var rank: Int
    var count: Int
    """Adapters in the stacks."""
    var workers: Workers

    def run[dtype: DType, weight_dtype: DType](self) raises:
        """Computes it on the CPU."""
        var adapters = memory_at[DType.int32](self.adapters)
        for row in range(self.m):
            var adapter = Int(adapters[unsafe_offset=row])
            if adapter < -1 or adapter >= self.count:
                raise Error("adapters: row ", row, " names adapter ", adapter, " of ", self.count)
        AdapterLinear[dtype, weight_dtype](
            memory_at[dtype](self.result),
            memory_at[dtype](self.y),
            memory_at[dtype](self.x),
            memory_at[weight_dtype](self.a),
            memory_at[weight_dtype](self.b),
            adapters,
            self.m,
            self.n,
            self.k,
            self.rank,
        ).run(self.workers)
