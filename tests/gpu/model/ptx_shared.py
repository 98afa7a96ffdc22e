"""The shared memory of a block: its bytes, and which of them are not yet behind a proxy fence."""

from __future__ import annotations

import numpy as np

from gpu.model.ptx_units import SHARED, swizzled
from gpu.model.ptx_wgmma import operand_addresses


class SharedMemory:
    """Begins at address SHARED, filled with ones (NaN)."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(b"\xff" * (size + SHARED))
        self.elements = np.frombuffer(self.bytes, np.uint16)
        self._array = np.frombuffer(self.bytes, np.uint8)
        self._unfenced = np.zeros(len(self.bytes), np.int32)  # the thread that stored, plus 1
        self._stored: dict[int, list[slice]] = {}  # by thread, since its latest fence

    def load(self, address: int, size: int) -> bytearray:
        assert SHARED <= address <= len(self.bytes) - size, "shared memory"
        return self.bytes[address : address + size]

    def store(self, address: int, raw: bytes, thread: int) -> None:
        assert SHARED <= address <= len(self.bytes) - len(raw), "shared memory"
        span = slice(address, address + len(raw))
        self.bytes[span] = raw
        self._unfenced[span] = thread + 1
        self._stored.setdefault(thread, []).append(span)

    def fence_proxy(self, thread: int) -> None:
        """The words that the thread has stored may be touched by copies and by wgmma."""
        for span in self._stored.pop(thread, ()):
            part = self._unfenced[span]
            part[part == thread + 1] = 0

    def expect(self, target: int, size: int) -> None:
        """A copy has begun: until it has arrived, anything may be found there."""
        assert SHARED <= target <= len(self.bytes) - size, "shared memory"
        self.bytes[target : target + size] = b"\xff" * size

    def copy(self, target: int, data: np.ndarray, swizzle: int) -> None:
        at = swizzled(target + np.arange(data.size), swizzle)
        assert not self._unfenced[at].any(), "a copy overwrites what was stored without a fence"
        self._array[at] = data

    def operand(self, descriptor: int, rows: slice, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
        """[rows, 16]: rows of an operand of a wgmma as bits, and the addresses of their elements."""
        at = operand_addresses(descriptor, rows.stop, transposed)[rows]
        assert not self._unfenced[at].any(), "a wgmma reads what was stored without a fence"
        assert not self._unfenced[at + 1].any(), "a wgmma reads what was stored without a fence"
        return self.elements[at // 2], at
