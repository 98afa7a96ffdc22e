"""The memory of a case, and its arguments: built twice from one seed, once for the call and once for the model.

Every array of a case is a view of a block that is kept here, so that comparing the blocks of the two memories says
whether the call wrote what the model wrote, and nothing else: neither another argument nor the bytes around one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    **{
        name: np.dtype(name)
        for name in "float16 float32 float64 int8 int32 int64 uint32 uint8 int16 uint64 bool".split()
    },
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
EXTENDED = frozenset(DTYPES[name] for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
GUARD = 192
"""Bytes of a block before and after its array."""


class Memory:
    """Blocks of bytes; two memories that were asked for the same arrays have the same contents and alignment."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> np.ndarray:
        """Memory for an array in C order, `offset` bytes past an address that 64 divides; full of ones (NaN)."""
        size = int(np.prod(shape)) * dtype.itemsize
        block = np.full(size + 2 * GUARD + 64, 0xFF, np.uint8)
        start = -(block.ctypes.data + GUARD) % 64 + GUARD + offset
        self.blocks.append(block)
        return block[start : start + size].view(dtype).reshape(shape)

    def put(self, array: np.ndarray, offset: int = 0) -> np.ndarray:
        """A copy of an array in a block of its own."""
        view = self.new(array.shape, array.dtype, offset)
        view[...] = array
        return view

    def contents(self) -> list[bytes]:
        """The bytes of all blocks, from the address that 64 divides."""
        found = []
        for block in self.blocks:
            start = -block.ctypes.data % 64
            found.append(block[start : start + len(block) - 64].tobytes())
        return found


@dataclass
class Argument:
    """An array that a call gets for one of its parameters."""

    value: Any
    view: np.ndarray | None = None
    """The same memory in NumPy where it is an array, as the model sees it."""
    kind: str = "plain"
    """"numpy", "torch", "max" or "jax" of an array."""
    is_index: bool = False
    """It holds offsets, page ids, lengths or positions, in any integer dtype."""


def as_kind(view: np.ndarray, kind: str) -> Any:
    """An array as one of another library, over the same memory (JAX: a copy); None where that library has none such."""
    raw = view.view(f"u{view.itemsize}") if view.dtype in EXTENDED else view
    try:
        if kind == "torch":
            torch = sys.modules["torch"]
            tensor = torch.from_numpy(raw)
            return tensor.view(getattr(torch, view.dtype.name)) if view.dtype in EXTENDED else tensor
        if kind == "max":
            from max.driver import Buffer
            from max.dtype import DType

            buffer = Buffer.from_dlpack(raw)
            return buffer.view(DType[view.dtype.name], view.shape) if view.dtype in EXTENDED else buffer
        if kind == "jax":
            import jax.numpy as jnp

            array = jnp.array(view)
            return array if array.dtype == view.dtype else None
    except (TypeError, ValueError, RuntimeError, BufferError):
        return None
    return view


def values(result: Any) -> np.ndarray:
    """The values of an array of any library, in a NumPy array; bfloat16 and float8 as `ml_dtypes` has them."""
    if isinstance(result, np.ndarray):
        return result
    torch = sys.modules["torch"]
    if isinstance(result, torch.Tensor):
        name = str(result.dtype).removeprefix("torch.")
        if DTYPES[name] in EXTENDED:
            raw = {1: torch.uint8, 2: torch.int16}[result.itemsize]
            return result.view(raw).numpy().view(DTYPES[name])
        return result.numpy()
    if type(result).__module__.startswith("jax"):
        return np.asarray(result)
    name = result.dtype.name  # a MAX buffer
    if DTYPES[name] in EXTENDED:
        from max.dtype import DType

        raw = {1: DType.uint8, 2: DType.uint16}[DTYPES[name].itemsize]
        return result.view(raw, result.shape).to_numpy().view(DTYPES[name])
    return result.to_numpy()


def overlaps_itself(view: np.ndarray) -> bool:
    """Return whether two elements of a small view share a byte."""
    at = np.zeros((1,) * view.ndim, np.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        at = at + (np.arange(size) * stride).reshape([-1 if a == axis else 1 for a in range(view.ndim)])
    ordered = np.sort(at, axis=None)
    return bool((np.diff(ordered) < view.itemsize).any())


def share(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two views share a byte; of large ones whether their ranges do."""
    if max(a.size, b.size) > 10**6:
        return np.may_share_memory(a, b)
    return np.shares_memory(a, b)
