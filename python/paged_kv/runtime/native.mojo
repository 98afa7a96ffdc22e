"""The kernels of one pair of dtypes as a shared library with a C interface, on OpenMP's threads.

    mojo build --emit shared-lib -D PAGED_KV_OPENMP -D ROWS=bfloat16 -D CACHE=int8 -I FOLDER native.mojo -o native.so

ROWS is the dtype of queries, of the rows of an append and a gather, and of linear layers; CACHE that of the cache's
memory, of which int8 and uint8 are codes where ROWS is another one. `native.py` builds and calls the library.

Each function gets the address of a struct of 64-bit numbers, and returns 0, or the address of a message, null-terminated,
which the caller frees. Operands and what is refused are those of the ops (`mojo_ops/README.md`). The memory that is
written comes with its bytes, which must be those that dtype and shape take; that other memory has room for what the
numbers say, the caller has checked.
"""

from std.ffi import external_call
from std.memory import unsafe_memcpy
from std.sys import size_of
from std.sys.defines import get_defined_dtype

from mojo_ops.attention.checks import check_heads, check_rows
from mojo_ops.attention.cpu.dispatch import attend_on_cpu
from mojo_ops.attention.operands import AttentionOperands
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.operands import KVCachePair
from mojo_ops.cache.pointers import RowPointer, TablePointer
from mojo_ops.isa.codes import is_codes
from mojo_ops.linear.dispatch import linear
from mojo_ops.linear.member import LinearMember
from mojo_ops.transfer.append import AppendRows, append_rows
from mojo_ops.transfer.checks import check_append, check_gather
from mojo_ops.transfer.gather import gather_rows

comptime ROWS = get_defined_dtype["ROWS", DType.float32]()
comptime CACHE = get_defined_dtype["CACHE", DType.float32]()
comptime COMPUTES = ROWS == DType.float32 or ROWS == DType.bfloat16 or ROWS == DType.float16
"""Whether there are attention and linear layers: else rows are copied."""
comptime TRANSFERS = ROWS == CACHE or is_codes(CACHE)
"""Whether there are appends and gathers: no row of another dtype becomes float8."""

comptime Memory[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
comptime Constants[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]


@fieldwise_init
struct Output[dtype: DType](TrivialRegisterPassable):
    """An array that is written."""

    var data: Memory[Self.dtype]
    var bytes: Int

    def check(self, name: StringSlice, *sizes: Int) raises:
        """Refuses memory of another size than that of an array of this shape and dtype."""
        var needed = size_of[Scalar[Self.dtype]]()
        for size in sizes:
            needed *= size
        if self.bytes != needed:
            raise Error(
                name,
                " has ",
                self.bytes,
                " bytes, ",
                Self.dtype,
                " of its shape has ",
                needed,
            )


@fieldwise_init
struct Storage(TrivialRegisterPassable):
    """The memory of a cache."""

    var k: Memory[CACHE]
    var k_size: Int
    """Elements from the first address on."""
    var v: Memory[CACHE]
    var v_size: Int
    var view: Constants[DType.int64]
    """`[12]`: pages, page_size, kv_heads, last dimension; the start and the strides of page, slot and head of K, then of V.
    """


@fieldwise_init
struct Table(TrivialRegisterPassable):
    """A page table."""

    var entries: TablePointer
    """`[batch, max_pages]`."""
    var batch: Int
    var max_pages: Int

    def pair[codes: Bool](self, storage: Storage) raises -> KVCachePair[CACHE, codes=codes]:
        """K and V, of which a head is codes and a scale where `codes`."""
        return KVCachePair[CACHE, codes=codes].of_strided(
            storage.k,
            storage.k_size,
            storage.v,
            storage.v_size,
            storage.view,
            12,
            self.entries,
            self.batch,
            self.max_pages,
        )


@fieldwise_init
struct AttentionCall(TrivialRegisterPassable):
    """O `[R, Hq, D]` and lse `[R, Hq]` of q `[R, Hq, D]`."""

    var o: Output[ROWS]
    var lse: Output[DType.float32]
    var q: Memory[ROWS]
    var sinks: Constants[DType.float32]
    var num_sinks: Int
    var workers: Int
    """Threads, at most."""
    var storage: Storage
    # The rows, and what they read.
    var row_batch: RowPointer
    """`[R]`."""
    var row_lengths: RowPointer
    """`[R]`."""
    var num_rows: Int
    var table: Table
    # The plan.
    var num_heads: Int
    var head_dim: Int
    var slopes: Constants[DType.float32]
    var num_slopes: Int
    var window_left: Int
    var options: Constants[DType.float32]
    """`[5]`."""

    def run(self) raises:
        self.o.check("o", self.num_rows, self.num_heads, self.head_dim)
        self.lse.check("lse", self.num_rows, self.num_heads)
        var pair = self.table.pair[is_codes(CACHE)](self.storage)
        var call = AttentionOperands[ROWS, ROWS, NoMasks].of_pointers(
            self.o.data,
            self.lse.data,
            self.q,
            self.num_rows,
            self.num_heads,
            self.row_batch,
            self.row_lengths,
            NoMasks(),
            self.slopes,
            self.num_slopes,
            self.sinks,
            self.num_sinks,
            self.window_left,
            self.options,
        )
        check_heads(self.num_heads, pair.k.num_heads(), self.head_dim, pair.k.head_dim())
        call.logits.check()
        check_rows(pair.table, self.row_batch, self.row_lengths, self.num_rows, NoMasks(), call.logits)
        attend_on_cpu(call.rows, pair.k, pair.v, call.logits, self.workers)


@fieldwise_init
struct AppendCall(TrivialRegisterPassable):
    """K and v `[N, Hk, D]` into their slots: those of the cache's dtype are copied, others are quantised."""

    var k: Memory[ROWS]
    var v: Memory[ROWS]
    var workers: Int
    """Threads, at most."""
    var storage: Storage
    var batch_indices: RowPointer
    """`[N]`; -1 skips a row."""
    var positions: RowPointer
    """`[N]`."""
    var num_rows: Int
    var table: Table

    def run(self) raises:
        var pair = self.table.pair[ROWS != CACHE](self.storage)
        check_append(pair.table, self.batch_indices, self.positions, self.num_rows)
        var rows = AppendRows(self.batch_indices, self.positions, self.num_rows)
        append_rows(pair.k, pair.v, self.k, self.v, rows, self.workers)


@fieldwise_init
struct GatherCall(TrivialRegisterPassable):
    """The tokens of every request into k and v `[N, Hk, D]`, codes as the numbers that they stand for."""

    var k: Output[ROWS]
    var v: Output[ROWS]
    var workers: Int
    """Threads, at most."""
    var storage: Storage
    var indptr: RowPointer
    """`[batch + 1]`."""
    var num_rows: Int
    var table: Table

    def run(self) raises:
        var pair = self.table.pair[ROWS != CACHE](self.storage)
        self.k.check("k", self.num_rows, pair.k.num_heads(), pair.k.head_dim())
        self.v.check("v", self.num_rows, pair.v.num_heads(), pair.v.head_dim())
        check_gather(pair.table, self.indptr, self.num_rows)
        gather_rows(pair.k, pair.v, self.k.data, self.v.data, self.indptr, self.table.batch, self.workers)


@fieldwise_init
struct LinearCall(TrivialRegisterPassable):
    """Y `[M, N]` = x `[M, K]` times w `[N, K]` transposed."""

    var y: Output[ROWS]
    var x: Memory[ROWS]
    var w: Memory[ROWS]
    var m: Int
    var n: Int
    var k: Int
    var workers: Int
    """Threads, at most."""

    def run(self) raises:
        self.y.check("y", self.m, self.n)
        var members = Array[LinearMember[ROWS, ROWS], 1](fill=LinearMember(self.y.data, self.w, self.n))
        linear(members, self.x, self.m, self.k, self.workers)


def message_of(error: Error) -> Int:
    """The address of a copy of what an error says, in C's memory."""
    var text = String(error)
    var length = text.byte_length()
    var copy = external_call["malloc", Memory[DType.uint8]](length + 1)
    unsafe_memcpy(dest=copy, src=text.unsafe_ptr(), count=length)
    copy[unsafe_offset=length] = 0
    return Int(copy)


@export("paged_kv_attend")
def attend(call: Pointer[AttentionCall, ImmUntrackedOrigin]) abi("C") -> Int:
    comptime if COMPUTES:
        try:
            call[].run()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_append")
def append(call: Pointer[AppendCall, ImmUntrackedOrigin]) abi("C") -> Int:
    comptime if TRANSFERS:
        try:
            call[].run()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_gather")
def gather(call: Pointer[GatherCall, ImmUntrackedOrigin]) abi("C") -> Int:
    comptime if TRANSFERS:
        try:
            call[].run()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_linear")
def linear_layer(call: Pointer[LinearCall, ImmUntrackedOrigin]) abi("C") -> Int:
    comptime if COMPUTES:
        try:
            call[].run()
        except error:
            return message_of(error)
    return 0
