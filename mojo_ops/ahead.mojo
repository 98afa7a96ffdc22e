"""Prefetching the memory of the next half of the work while the arithmetic of this half runs."""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime TILE = 32
"""Tokens that are worked on together: more of them let the sums stay in registers for longer, fewer stay in cache."""
comptime STREAMS = 8
"""Places that are read side by side: the hardware follows ascending lines in several memory pages at once."""
comptime LINE = 64

comptime Offsets = Pointer[Int, MutUntrackedOrigin]


struct Ahead(Movable):
    """Walks over the K or the V of one tile, all heads of all its tokens, a cache line of several streams at a time.

    Its rows are runs of contiguous memory: a token where its heads are neighbours (NHD), otherwise one head of one
    token, ordered by head. Every stream has the same number of rows, one after the other. `share` lists the addresses
    that go with the work on one head; `run` asks for some of them, between two steps of the arithmetic.
    """

    var tokens: Offsets
    """`[TILE]`: elements from `base` to the first head of each token."""
    var list: Offsets
    """`[list_length]`: the addresses of the present share."""
    var next: Int
    """The first of them that was not asked for."""
    var last: Int
    """Where they end."""
    var rate: Int
    """Addresses of one call of `run`."""
    var base: Int
    var size: Int
    """Bytes of an element."""
    var head_stride: Int
    var row_bytes: Int
    var rows: Int
    """Rows of a stream."""
    var row: Int
    """How many of them `cursors` has come to."""
    var column: Int
    """Bytes into the row."""
    var cursors: SIMD[DType.int64, STREAMS]
    """The address of each stream's present row."""

    @staticmethod
    def list_length(dim: Int, size: Int) -> Int:
        """Addresses that one share takes at most."""
        return 2 * TILE * ceildiv(dim * size, LINE) + 4 * STREAMS

    def __init__[
        dtype: DType, //
    ](
        out self,
        base: Pointer[Scalar[dtype], _],
        tokens: Offsets,
        list: Offsets,
        count: Int,
        heads: Int,
        dim: Int,
        head_stride: Int,
    ):
        """`count` = 0 stands for nothing to fetch."""
        var by_token = head_stride == dim
        self.tokens = tokens
        self.list = list
        self.next = 0
        self.last = 0
        self.rate = 0
        self.base = Int(base)
        self.size = size_of[dtype]()
        self.head_stride = head_stride
        self.row_bytes = (heads * dim if by_token else dim) * self.size
        self.rows = 0 if count == 0 else (TILE if by_token else TILE * heads) // STREAMS
        self.row = 0
        self.column = self.row_bytes
        self.cursors = SIMD[DType.int64, STREAMS](0)

    @no_inline
    def share(mut self, heads: Int, calls: Int):
        """Lists the next of `heads` equal shares, for `calls` calls of `run`."""
        var rounds = ceildiv(self.rows * ceildiv(self.row_bytes, LINE), heads)
        var count = 0
        while count < rounds:
            if self.column >= self.row_bytes:
                if self.row == self.rows:
                    break
                for s in range(STREAMS):
                    var head, token = divmod(self.row + s * self.rows, TILE)
                    var at = self.tokens[unsafe_offset=token] + head * self.head_stride
                    self.cursors[s] = Int64(self.base + at * self.size)
                self.row += 1
                self.column = 0
            var addresses = self.cursors + Int64(self.column)
            self.list.unsafe_bitcast[Int64]().unsafe_store(count * STREAMS, addresses)
            self.column += LINE
            count += 1
        self.next = 0
        self.last = count * STREAMS
        self.rate = ceildiv(self.last, calls)
        # The last call may ask for some lines again, and every further one does.
        for i in range(self.rate):
            self.list[unsafe_offset=self.last + i] = self.list[unsafe_offset=self.last - 1]

    @always_inline
    def run(mut self):
        """Prefetches one call's part of the share."""
        var at = self.next
        for i in range(self.rate):
            prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=self.list[unsafe_offset=at + i])
            )
        self.next = min(at + self.rate, self.last)
