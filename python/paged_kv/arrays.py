"""Arrays in and out of MAX without a copy.

NumPy has no bfloat16 or float8: those come as `ml_dtypes` arrays, which DLPack does not carry,
so their bytes travel and the buffer is told its type.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from max.driver import Buffer
from max.dtype import DType

_EXTENDED = {
    np.dtype(ml_dtypes.bfloat16): DType.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): DType.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): DType.float8_e5m2,
}
_NUMPY = {dtype: numpy for numpy, dtype in _EXTENDED.items()}


def to_buffer(array: Any) -> Buffer:
    """A CPU buffer over the memory of any C-contiguous DLPack array or NumPy (`ml_dtypes`) array."""
    if isinstance(array, Buffer):
        return array
    if isinstance(array, np.ndarray) and array.dtype in _EXTENDED:
        raw = array.view(np.dtype(f"u{array.dtype.itemsize}"))
        return Buffer.from_dlpack(raw).view(_EXTENDED[array.dtype], array.shape)
    return Buffer.from_dlpack(array)


def to_numpy(buffer: Buffer) -> np.ndarray:
    """A NumPy array over the memory of a CPU buffer."""
    if buffer.dtype in _NUMPY:
        raw = buffer.view(DType.uint16 if buffer.dtype == DType.bfloat16 else DType.uint8, buffer.shape)
        return raw.to_numpy().view(_NUMPY[buffer.dtype])
    return buffer.to_numpy()


def numpy_dtype(dtype: DType) -> np.dtype:
    """The NumPy (or `ml_dtypes`) dtype of a MAX dtype."""
    return _NUMPY.get(dtype) or np.dtype(dtype.to_numpy())


def cache_operands(k_view: np.ndarray, v_view: np.ndarray) -> tuple[Buffer, Buffer, Buffer]:
    """Flat storage of K and of V and the 12 numbers of `view` (`mojo_ops/ops.mojo`), nothing copied.

    `k_view` and `v_view` are `[page, slot, Hk, D]` views of any storage with a unit last stride.
    """
    numbers = list(k_view.shape)
    flat = []
    for view in (k_view, v_view):
        strides = [stride // view.itemsize for stride in view.strides]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True))
        flat.append(np.lib.stride_tricks.as_strided(view, (extent if view.size else 0,), (view.itemsize,)))
        numbers += [0, *strides[:3]]
    return to_buffer(flat[0]), to_buffer(flat[1]), to_buffer(np.array(numbers, np.int64))
