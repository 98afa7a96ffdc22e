"""Prefetching the memory that is read next while the arithmetic of what was read before runs."""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime KV_TILE_TOKENS = 32
"""Tokens that are worked on together: more of them let the sums stay in registers for longer, fewer stay in cache."""
comptime STREAMS = 8
"""Places that are read side by side: the hardware follows ascending lines in several memory pages at once."""
comptime RUN_TOKENS = 16
"""Consecutive tokens of each of the `STREAMS` runs of a field: pages of 16 lie in the right places."""
comptime SPAN_TOKENS = RUN_TOKENS * STREAMS
"""Tokens that are read as `STREAMS` runs side by side."""
comptime EARLY_V_TOKENS = STREAMS
"""Tokens of a tile whose V the matrix tiles ask for before they work on its K."""
comptime CACHE_LINE_BYTES = 64
comptime FIXED_POINT_ONE = 1 << 16
"""What `due` and `rate` count: this many stand for one line of each stream."""

comptime IntPointer = Pointer[Int, MutUntrackedOrigin]


struct Prefetcher[*, near: Bool](Movable):
    """Walks over rows of contiguous memory, `STREAMS` of them side by side, a cache line of each at a time.

    `add` lists the rows, `start` shares their lines out among the calls of `run`, which asks for what is due between two
    steps of the arithmetic, evenly: memory idles whenever nobody has asked for a while. `run` must not call anybody: the
    sums that wait in registers around it would all have to be saved.

    Parameters:
        near: Whether the lines are read so soon that the first-level cache still holds them; else the second-level one has
            to do.
    """

    var rows: IntPointer
    """The addresses of the present rows, and of those that follow."""
    var count: Int
    """Rows, a multiple of `STREAMS`."""
    var line: Int
    """Bytes from the start of the present rows to their next lines."""
    var row_bytes: Int
    """Where they end: whole lines."""
    var due: Int
    var rate: Int
    """What each call of `run` adds to `due`."""

    @always_inline
    def __init__(out self, rows: IntPointer, row_bytes: Int):
        """No row yet: `run` does nothing.

        Args:
            rows: Room for the addresses.
            row_bytes: The length of each row.
        """
        self.rows = rows
        self.count = 0
        self.line = 0
        self.row_bytes = ceildiv(row_bytes, CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self.due = 0
        self.rate = 0

    @always_inline
    def add_rows[
        dtype: DType, //
    ](mut self, base: Pointer[Scalar[dtype], _], tokens: IntPointer, begin: Int, end: Int, offset: Int):
        """Lists the rows that begin `offset` elements past `tokens[begin]` to `tokens[end - 1]` from `base`.

        `end - begin` is a multiple of `STREAMS`, and so is the number of rows before.
        """
        for i in range(begin, end, STREAMS):
            var at = tokens.unsafe_load[width=STREAMS](i) + offset
            self.rows.unsafe_store(self.count, at * size_of[dtype]() + Int(base))
            self.count += STREAMS

    @always_inline
    def start(mut self, calls: Int):
        """Shares the rows out among `calls` calls of `run`; there must not be more calls."""
        self.rate = ceildiv(self.count // STREAMS * (self.row_bytes // CACHE_LINE_BYTES) * FIXED_POINT_ONE, calls)

    @always_inline
    def address(self, stream: Int) -> Int:
        """The next line of a stream."""
        return self.rows[unsafe_offset=stream] + self.line

    @always_inline
    def run(mut self):
        """Prefetches what is due."""
        comptime cache = PrefetchOptions().for_read().to_data_cache()
        self.due += self.rate
        while self.due >= FIXED_POINT_ONE:
            self.due -= FIXED_POINT_ONE
            comptime for stream in range(STREAMS):
                var line = Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=self.address(stream))
                comptime if Self.near:
                    prefetch[cache.high_locality()](line)
                else:
                    prefetch[cache.medium_locality()](line)
            self.line += CACHE_LINE_BYTES
            if self.line == self.row_bytes:
                self.line = 0
                self.rows = self.rows.unsafe_offset(STREAMS)
