"""Prefetching the memory of the next half of the work while the arithmetic of this half runs."""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime TILE = 32
"""Tokens that are worked on together: more of them let the sums stay in registers for longer, fewer stay in cache."""
comptime STREAMS = 8
"""Places that are read side by side: the hardware follows ascending lines in several memory pages at once."""
comptime BURST = 4
"""Lines that are asked for together, one each of so many streams."""
comptime LINE = 64
comptime WHOLE = 1 << 16
"""What `due` and `rate` count: this many stand for a burst."""

comptime Offsets = Pointer[Int, MutUntrackedOrigin]


struct Ahead(Movable):
    """Walks over the K or the V of one tile, all heads of all its tokens, a cache line of several streams at a time.

    Its rows are runs of contiguous memory: a token where its heads are neighbours (NHD), otherwise one head of one
    token, ordered by head. Every stream has the same number of rows, one after the other. `run` asks for what is due
    between two steps of the arithmetic, evenly, for memory idles whenever nobody has asked for a while. It must not
    call anybody: the sums that wait in registers around it would all have to be saved.
    """

    var rows: Offsets
    """The addresses of the present rows: every `stream_rows`-th one from here on is a stream's."""
    var stream_rows: Int
    """Rows of a stream."""
    var line: Int
    """Lines of the present rows that were asked for, of all streams."""
    var row_lines: Int
    """Where they end."""
    var due: Int
    var rate: Int
    """What each call of `run` adds to `due`."""

    @staticmethod
    def rows_length(kv_heads: Int) -> Int:
        """The addresses that `rows` needs room for."""
        return TILE * kv_heads

    def __init__[
        dtype: DType, //
    ](
        out self,
        base: Pointer[Scalar[dtype], _],
        tokens: Offsets,
        rows: Offsets,
        count: Int,
        heads: Int,
        dim: Int,
        head_stride: Int,
        calls: Int,
    ):
        """The lines of `count` tokens, elements `tokens` `[TILE]` from `base`, for `calls` calls of `run`.

        There must not be more calls. No count is no work; of any other, the last token stands in for those that are missing.
        """
        var by_token = head_stride == dim
        self.rows = rows
        self.stream_rows = (TILE if by_token else TILE * heads) // STREAMS
        self.line = 0
        self.row_lines = ceildiv((heads * dim if by_token else dim) * size_of[dtype](), LINE) * STREAMS
        self.due = 0
        self.rate = 0
        if count > 0:
            self.rate = ceildiv(self.stream_rows * self.row_lines * (WHOLE // BURST), calls)
            comptime Row = SIMD[DType.int, STREAMS]
            for head in range(1 if by_token else heads):
                for token in range(0, TILE, STREAMS):
                    var at = tokens.unsafe_load[width=STREAMS](token) + head * head_stride
                    rows.unsafe_store(head * TILE + token, at * size_of[dtype]() + Int(base))

    def __init__(out self, rows: Offsets):
        """No work: `run` does nothing."""
        self.rows = rows
        self.stream_rows = 0
        self.line = 0
        self.row_lines = 0
        self.due = 0
        self.rate = 0

    @always_inline
    def address(self, s: Int) -> Int:
        """Line `s` of the next burst."""
        var stream = self.line % STREAMS + s
        return self.rows[unsafe_offset=stream * self.stream_rows] + self.line // STREAMS * LINE

    @always_inline
    def run(mut self):
        """Prefetches what is due."""
        self.due += self.rate
        while self.due >= WHOLE:
            self.due -= WHOLE
            comptime for s in range(BURST):
                prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                    Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=self.address(s))
                )
            self.line += BURST
            if self.line == self.row_lines:
                self.line = 0
                self.rows = self.rows.unsafe_offset(1)
