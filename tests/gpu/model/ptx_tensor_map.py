"""Tensor maps of the TMA unit: what `cuTensorMapEncodeTiled` takes, and the copy of a box.

The 128 bytes that the driver makes of it are not published: to the model a map is a parameter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_RANK = 5
ELEMENT_BYTES = {"u8": 1, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that a copy fetches; the innermost dimension first.

    The numbers are those that the driver takes, and its limits are checked. Element strides are 1, nothing is
    interleaved, zeros are filled in.
    """

    address: int
    dtype: str  # "u8", "f16" or "bf16"
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]  # elements
    swizzle: int = 0
    """Bytes of a swizzled row in shared memory: 128, or 0 for no swizzle."""

    def __post_init__(self) -> None:
        rank, inner = len(self.dims), self.box[0] * self.element_bytes
        assert 1 <= rank <= MAX_RANK, f"rank {rank}"
        assert len(self.strides) == rank - 1, "a stride for all dimensions but the innermost"
        assert len(self.box) == rank, "a side of the box for each dimension"
        assert self.address % 16 == 0, f"address {self.address:x}"
        assert all(1 <= dim <= 1 << 32 for dim in self.dims), f"dims {self.dims}"
        assert all(stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in self.strides), f"strides {self.strides}"
        assert all(1 <= side <= 256 for side in self.box), f"box {self.box}"
        assert inner % 16 == 0, f"{inner} bytes in a row of the box"
        assert not self.swizzle or inner <= self.swizzle, f"{inner} bytes in a swizzled row of {self.swizzle}"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes

    def copied(self, memory: np.ndarray, at: int, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes of the box at `coordinates`, `[box_bytes]`; zeros outside the tensor.

        Args:
            memory: Holds the tensor, as bytes.
            at: Where element 0 lies in it.
            coordinates: Those of the box's first element; innermost first.
        """
        inner, *outer = (np.arange(size) + first for size, first in zip(self.box, coordinates, strict=True))
        offsets = np.zeros(1, np.int64)
        inside = np.ones(1, bool)
        for i, dim, stride in zip(outer, self.dims[1:], self.strides, strict=True):  # inner ones first
            offsets = (i[:, None] * stride + offsets).ravel()
            inside = (((i >= 0) & (i < dim))[:, None] & inside).ravel()
        elements = (inner * self.element_bytes)[:, None] + np.arange(self.element_bytes)
        within = np.repeat((inner >= 0) & (inner < self.dims[0]), self.element_bytes)
        found = inside[:, None] & within
        where = np.where(found, at + offsets[:, None] + elements.ravel(), 0)
        assert where.min() >= 0, "a tensor map's address"
        assert where.max() < memory.size, "a tensor map's address"
        return np.where(found, memory[where], np.uint8(0)).ravel()
