"""Tensor maps of the TMA unit: what `cuTensorMapEncodeTiled` takes, its 128 bytes, and the copy of a box.

The layout of the bytes is not published, but PTX can change all fields that matter (`tensormap.replace`), and ptxas
turns that into loads and stores. These are the positions that the code of ptxas 13.0 for sm_90a shows; little-endian:

    byte 0    address                          byte 28   bits 32 to 35 of each stride / 16, 4 bits each
    byte 8    bits 4-6    rank - 1             byte 32   dims - 1, 4 bytes each
              bits 7-10   dtype                byte 52   element strides - 1, 3 bits each from bit 0
              bits 11-12  interleave           byte 55   box - 1, one byte each
              bits 13-14  swizzle              byte 60   nothing known
              bit 15      fill (0: zeros)
    byte 12   bits 0 to 31 of each stride / 16, 4 bytes each

The other bits are the driver's own, among them where it says how much a miss brings into L2: they are 0 in `KNOWN`. Not
compared with a driver's bytes until tests/gpu/test_tensor_map_bytes.py has run on a GPU.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

MAP_BYTES = 128
MAX_RANK = 5
DTYPES = {"u8": 0, "f16": 6, "bf16": 10}
"""As the bytes have them; element strides are 1, nothing is interleaved, zeros are filled in."""
ELEMENT_BYTES = {"u8": 1, "f16": 2, "bf16": 2}
SWIZZLES = (0, 32, 64, 128)
"""Bytes of a swizzled row in shared memory, by the number in the bytes; 0: no swizzle."""

_FIELDS = struct.Struct("<QI4II5II4B")
KNOWN_FLAGS = 0x7F << 4 | 0x1F << 11
"""Of the word at byte 8."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that a copy fetches; the innermost dimension first.

    The numbers are those that the driver takes, and its limits are checked.
    """

    address: int
    dtype: str  # "u8", "f16" or "bf16"
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]  # elements
    swizzle: int = 0

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

    def encode(self) -> bytes:
        """The 128 bytes; zeros where they are not known."""
        rank = len(self.dims)
        flags = rank - 1 << 4 | DTYPES[self.dtype] << 7 | SWIZZLES.index(self.swizzle) << 13
        strides = [stride >> 4 for stride in self.strides] + [0] * (MAX_RANK - rank)
        high = sum(stride >> 32 << 4 * i for i, stride in enumerate(strides))
        dims = [dim - 1 for dim in self.dims] + [0] * (MAX_RANK - rank)
        box = [side - 1 for side in self.box] + [0] * (MAX_RANK - rank)
        low = (stride & 0xFFFFFFFF for stride in strides)
        return _FIELDS.pack(self.address, flags, *low, high, *dims, box[0] << 24, *box[1:]).ljust(MAP_BYTES, b"\0")

    @staticmethod
    def decode(raw: bytes) -> TensorMap:
        """The map of 128 bytes, the driver's among them."""
        address, flags, *words = _FIELDS.unpack_from(raw)
        low, high, dims, strides_of_elements, box = words[:4], words[4], words[5:10], words[10], words[11:]
        assert not strides_of_elements & 0x7FFF, "element strides that the model does not have"
        assert not flags & (0x3 << 11 | 1 << 15), "an interleaved map, or one that fills in NaN"
        rank = (flags >> 4 & 7) + 1
        dtype = next(name for name, number in DTYPES.items() if number == flags >> 7 & 15)
        sides = [strides_of_elements >> 24, *box]
        strides = [(word | (high >> 4 * i & 15) << 32) << 4 for i, word in enumerate(low)]
        return TensorMap(
            address,
            dtype,
            tuple(dim + 1 for dim in dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(side + 1 for side in sides[:rank]),
            SWIZZLES[flags >> 13 & 3],
        )

    def copied(self, memory: np.ndarray, at: int, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes of the box at `coordinates`, `[box_bytes]`; zeros outside the tensor.

        Args:
            memory: Holds the tensor, as bytes.
            at: Where element 0 lies in it.
            coordinates: Of the box's first element; innermost first.
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


def _known() -> bytes:
    """A bit is 1 where `encode` knows what it is, in a map of the highest rank."""
    flags = _FIELDS.pack(2**64 - 1, KNOWN_FLAGS, *[2**32 - 1] * 4, 0xFFFF, *[2**32 - 1] * 5, 0xFF007FFF, *[255] * 4)
    return flags.ljust(MAP_BYTES, b"\0")


KNOWN = _known()
