"""Where torch's tensors lie, as the libraries of kernels are told, and how many threads a call may take."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.runtime.native import may_use_threads

_STORAGE = struct.Struct("<5q")


def workers() -> int:
    """Threads of a call: as many as torch was set to; one in a process that has lost its threads to a fork."""
    return torch.get_num_threads() if may_use_threads() else 1


def extent(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def holds(tensor: Tensor, count: int) -> bool:
    """Whether a tensor is an ordinary one, whose memory lies on the CPU, is aligned and has `count` elements."""
    size = tensor.itemsize
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and not tensor.is_neg()
        and tensor.data_ptr() % size == 0
        and (tensor.storage_offset() + count) * size <= tensor.untyped_storage().nbytes()
    )


def output(tensor: Tensor) -> tuple[int, int]:
    """`Output` (`runtime/native.mojo`) of a contiguous tensor: its address and its bytes."""
    return tensor.data_ptr(), tensor.nbytes


_PLAIN = (Tensor, torch.nn.Parameter)


def layout(k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What decides much of what is refused of K and V."""
    return k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride()


@dataclass(frozen=True)
class CacheLayout:
    """K and V `[pages, page_size, Hk, D]` of one layout, which was checked. It keeps no memory of a cache."""

    k_extent: int
    v_extent: int
    view: np.ndarray
    """`[12]` int64: the numbers of `Storage.view` (`runtime/native.mojo`)."""
    view_at: int

    @staticmethod
    def of(k: Tensor, v: Tensor) -> CacheLayout:
        numbers = [*k.shape, 0, *k.stride()[:3], 0, *v.stride()[:3]]
        view = np.array(numbers, np.int64)
        return CacheLayout(extent(k), extent(v), view, view.ctypes.data)

    def held_by(self, k: Tensor, v: Tensor) -> bool:
        """Whether two tensors of this layout are ordinary and have the memory."""
        return holds(k, self.k_extent) and holds(v, self.v_extent)

    def storage(self, k: Tensor, v: Tensor) -> bytes:
        """`Storage`: as long as the tensors and this object live."""
        return _STORAGE.pack(k.data_ptr(), self.k_extent, v.data_ptr(), self.v_extent, self.view_at)
