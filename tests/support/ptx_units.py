"""What works beside the threads of a multiprocessor: mbarriers, tensor maps of the TMA unit, operands of wgmma."""

from dataclasses import dataclass

import numpy as np


@dataclass
class TensorMap:
    """A view `[page, slot, head, dim]` as bytes, and the box that a copy fetches."""

    data: np.ndarray  # uint8 [page, slot, head, dim * element size]
    slots: int
    box_bytes: int
    element: int
    swizzled: bool

    def box(self, dim: int, head: int, slot: int, page: int) -> np.ndarray:
        """[slots, box_bytes]; zeros outside the view."""
        out = np.zeros((self.slots, self.box_bytes), np.uint8)
        pages, slots, heads, row = self.data.shape
        at = dim * self.element
        if 0 <= page < pages and 0 <= head < heads and 0 <= at < row:
            for i in range(self.slots):
                if 0 <= slot + i < slots:
                    part = self.data[page, slot + i, head, at : at + self.box_bytes]
                    out[i, : part.size] = part
        return out


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


def swizzled(at: np.ndarray) -> np.ndarray:
    """Where the bytes at these addresses lie under the 128-byte swizzle."""
    return at ^ ((at >> 3) & 0x70)


def operand_addresses(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """[rows, 16]: where a wgmma finds the 2-byte elements of an operand."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    mode = descriptor >> 62
    if mode == 1 and not transposed:
        at = start + row // 8 * stride + row % 8 * 128 + k * 2
    elif mode == 1:
        at = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
    elif mode == 0 and not transposed:
        at = start + row // 8 * stride + k // 8 * leading + row % 8 * 16 + k % 8 * 2
    else:
        assert mode == 0, "a swizzle that the model does not have"
        at = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    return swizzled(at) if mode == 1 else at


def positions_of_sums(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column in a product [64, columns] of each register of a warpgroup's threads, `[128, columns / 2]`."""
    thread, i = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
    lane, warp = thread % 32, thread // 32
    return warp * 16 + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2
