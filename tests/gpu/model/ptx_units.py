"""Threads, the addresses of what is not in global memory, mbarriers, the swizzle, and the lanes of a shuffle."""

from dataclasses import dataclass, field

import numpy as np

SHARED = 1024  # where shared memory starts: a multiple of 1024, but not 0
PARAMETERS = 1 << 30
PARAMETER_BYTES = 4096


@dataclass
class Thread:
    index: int
    block: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Registers of wgmmas that other instructions have accessed since the latest `wgmma.fence`."""
    pc: int = 0
    waits_for: tuple | None = None
    done: bool = False
    admitted: bool = True
    """True if the grid before this one has ended: after `griddepcontrol.wait`, where this one may begin earlier."""


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    pending: int
    bytes: int = 0
    completed: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than an mbarrier expects"
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count


class Barriers:
    """The mbarriers of a block, by address."""

    def __init__(self) -> None:
        self._barriers: dict[int, Barrier] = {}
        self._unfenced: dict[int, int] = {}
        """The thread that initialised each one of which the copy engine does not know yet."""

    def start(self, thread: int, address: int, count: int) -> None:
        self._barriers[address] = Barrier(count, count)
        self._unfenced[address] = thread

    def fence(self, thread: int) -> None:
        """A `fence.mbarrier_init` or a proxy fence."""
        self._unfenced = {address: other for address, other in self._unfenced.items() if other != thread}

    def __getitem__(self, address: int) -> Barrier:
        assert address in self._barriers, "an mbarrier before its init"
        return self._barriers[address]

    def of_copy(self, address: int) -> Barrier:
        """The one that a copy completes."""
        assert address not in self._unfenced, "a copy takes an mbarrier that was not fenced after its init"
        return self[address]


def swizzled(at: np.ndarray, span: int) -> np.ndarray:
    """Return where the bytes at these addresses lie under the swizzle of rows of `span` bytes: 0 (none), 32, 64,
    128.
    """
    return at ^ ((at >> 3) & (span - 16)) if span else at


def source_lane(mode: str, lane: int, argument: int) -> int:
    """The lane whose value a shuffle gives to `lane`."""
    if mode == "bfly":
        return lane ^ argument
    if mode == "up":
        return lane - argument if lane >= argument else lane
    assert mode == "idx", mode
    return argument & 31
