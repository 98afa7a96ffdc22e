"""Some rows of a matrix: embeddings of tokens, the last row of each request; some columns of all."""

from std.memory import unsafe_memcpy

from ..cache.pointers import RowPointer
from ..isa.threads import Workers, for_rows

comptime BytePointer = Pointer[UInt8, MutUntrackedOrigin]


@fieldwise_init
struct RowSelection(TrivialRegisterPassable):
    """`y[i] = x[rows[i]]`, rows of `row_bytes` bytes."""

    var y: BytePointer
    var x: BytePointer
    var rows: RowPointer
    var count: Int
    var row_bytes: Int

    @no_inline
    def copy(self, workers: Workers):
        """Copies them on up to `workers` threads. The rows were checked."""

        def task(begin: Int, end: Int) {var self}:
            for i in range(begin, end):
                var source = self.x.unsafe_offset(Int(self.rows[unsafe_offset=i]) * self.row_bytes)
                unsafe_memcpy(dest=self.y.unsafe_offset(i * self.row_bytes), src=source, count=self.row_bytes)

        for_rows(task, self.count, self.row_bytes, workers)


@fieldwise_init
struct ColumnSelection(TrivialRegisterPassable):
    """Some columns of each of `groups` groups of a row: `each` bytes from byte `first` of the `group` bytes of each.

    y `[rows, groups * each]`, x `[rows, groups * group]`, in bytes.
    """

    var y: BytePointer
    var x: BytePointer
    var rows: Int
    var groups: Int
    var group: Int
    var first: Int
    var each: Int

    @no_inline
    def copy(self, workers: Workers):
        """Copies them on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            for i in range(begin * self.groups, end * self.groups):
                var source = self.x.unsafe_offset(i * self.group + self.first)
                unsafe_memcpy(dest=self.y.unsafe_offset(i * self.each), src=source, count=self.each)

        for_rows(task, self.rows, self.groups * self.each, workers)
