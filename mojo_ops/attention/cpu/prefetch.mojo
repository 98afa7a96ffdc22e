"""Prefetching the memory that is read next, between the steps of the arithmetic on what was read before."""

from std.math import ceildiv
from std.sys import size_of

from ...isa.memory import CACHE_LINE_BYTES, prefetch_line

comptime KV_TILE_TOKENS = 32
"""Tokens of a KV tile. With more, the sums stay in registers for longer; with fewer, K and V stay in the cache."""
comptime STREAMS = 8
"""Ranges that are read side by side. The hardware prefetcher follows ascending lines in several 4 KB pages at once."""
comptime RUN_TOKENS = 16
"""Consecutive tokens of a run, one stream of a span: a whole page where pages have 16 slots."""
comptime SPAN_TOKENS = RUN_TOKENS * STREAMS
"""Tokens of a span, which is read as `STREAMS` runs side by side."""
comptime EARLY_V_TOKENS = STREAMS
"""Tokens of a tile whose V is prefetched together with its K, on matrix tiles."""
comptime FIXED_POINT_ONE = 1 << 16
"""One line of each stream, in the units of `Prefetcher.due` and `Prefetcher.rate`."""

comptime IntPointer = Pointer[Int, MutUntrackedOrigin]


struct Prefetcher[*, to_l1: Bool, side_by_side: Bool = True](Movable):
    """Prefetches ranges of contiguous memory, `STREAMS` ranges side by side, one cache line of each at a time.

    Unless `side_by_side`, ranges of whole `STREAMS` lines follow one another, `STREAMS` adjacent lines at a time, which
    takes fewer instructions: the addresses of `STREAMS` lines are one and a constant.

    `add_ranges` lists the ranges and `start` divides their lines evenly among the calls of `run`, because memory idles
    when no request is outstanding. `run` stands between two steps of the arithmetic. It must not call a function, for
    that would spill the sums that the registers hold.

    Parameters:
        to_l1: Whether the lines go into the first-level cache, else into the second-level cache.
        side_by_side: Whether ranges are read side by side, whatever their length.
    """

    var addresses: IntPointer
    """Addresses of the present `STREAMS` ranges, and of the ranges after them."""
    var count: Int
    """Ranges, a multiple of `STREAMS`."""
    var line_offset: Int
    """Bytes from the beginning of the present ranges to their next lines."""
    var range_bytes: Int
    """The length of a range, whole lines."""
    var due: Int
    """Lines that are to be prefetched now, in units of `1 / FIXED_POINT_ONE`."""
    var rate: Int
    """The number that each call of `run` adds to `due`."""

    @always_inline
    def __init__(out self, addresses: IntPointer, range_bytes: Int):
        """Without ranges: `run` does nothing.

        Args:
            addresses: Memory for the addresses of the ranges.
            range_bytes: The length of a range, rounded up to whole lines here.
        """
        self.addresses = addresses
        self.count = 0
        self.line_offset = 0
        self.range_bytes = ceildiv(range_bytes, CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self.due = 0
        self.rate = 0

    @always_inline
    def add_ranges[
        dtype: DType, //
    ](mut self, base: Pointer[Scalar[dtype], _], tokens: IntPointer, begin: Int, end: Int, offset: Int):
        """Lists the ranges that begin at elements `tokens[i] + offset` from `base`, for i in `[begin, end)`.

        `end - begin` is a multiple of `STREAMS`.
        """
        for i in range(begin, end, STREAMS):
            var at = tokens.unsafe_load[width=STREAMS](i) + offset
            self.addresses.unsafe_store(self.count, at * size_of[dtype]() + Int(base))
            self.count += STREAMS

    @always_inline
    def start(mut self, calls: Int):
        """Divides the ranges among `calls` calls of `run`. There must not be more calls."""
        self.rate = ceildiv(self.count // STREAMS * (self.range_bytes // CACHE_LINE_BYTES) * FIXED_POINT_ONE, calls)

    @always_inline
    def one_by_one(self) -> Bool:
        """Return whether ranges follow one another."""
        comptime if Self.side_by_side:
            return False
        return self.range_bytes % (STREAMS * CACHE_LINE_BYTES) == 0

    @always_inline
    def address(self, i: Int) -> Int:
        """The address of line `i` of the next `STREAMS`."""
        if self.one_by_one():
            return self.addresses[] + self.line_offset + i * CACHE_LINE_BYTES
        return self.addresses[unsafe_offset=i] + self.line_offset

    @always_inline
    def run(mut self):
        """Prefetches the lines that are due."""
        self.due += self.rate
        while self.due >= FIXED_POINT_ONE:
            self.due -= FIXED_POINT_ONE
            var together = STREAMS
            if self.one_by_one():
                var first = self.address(0)
                comptime for i in range(STREAMS):
                    Self.request(first + i * CACHE_LINE_BYTES)
                self.line_offset += (STREAMS - 1) * CACHE_LINE_BYTES
                together = 1
            else:
                comptime for i in range(STREAMS):
                    Self.request(self.address(i))
            self.line_offset += CACHE_LINE_BYTES
            if self.line_offset == self.range_bytes:
                self.line_offset = 0
                self.addresses = self.addresses.unsafe_offset(together)

    @staticmethod
    @always_inline
    def request(address: Int):
        """Prefetches one line."""
        prefetch_line[1 if Self.to_l1 else 2](Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=address))
