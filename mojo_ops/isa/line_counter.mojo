"""A counter of threads that has a cache line to itself."""

from std.atomic import Atomic

from .memory import CACHE_LINE_BYTES, align_to_line


struct LineCounter(Movable):
    """A counter, 0 at first. What other threads read beside it does not leave their caches when it is written."""

    var memory: List[Int64]

    def __init__(out self):
        self.memory = List[Int64](length=2 * CACHE_LINE_BYTES // 8, fill=0)

    @always_inline
    def at(self) -> Pointer[Atomic[Int64], MutUntrackedOrigin]:
        """The counter; it lives as long as `self`."""
        var start = self.memory.unsafe_ptr().unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        return align_to_line(start).unsafe_bitcast[Atomic[Int64]]()
