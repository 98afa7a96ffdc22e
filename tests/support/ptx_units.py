"""What works beside the threads of a multiprocessor: mbarriers, and the swizzle of shared memory."""

from dataclasses import dataclass

import numpy as np


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


def swizzled(at: np.ndarray, span: int) -> np.ndarray:
    """Where the bytes at these addresses lie under the swizzle of rows of `span` bytes: 0 (none), 32, 64, 128."""
    return at ^ ((at >> 3) & (span - 16)) if span else at
