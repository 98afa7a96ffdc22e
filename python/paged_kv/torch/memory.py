"""Addresses of torch's tensors, as the libraries of kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kv.call_layouts import CACHE_STORAGE, CACHE_VIEW
from paged_kv.errors import ContractError


def extent(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def holds(tensor: Tensor, count: int) -> bool:
    """Return whether a tensor is an ordinary one, whose memory lies on the CPU, is aligned and has `count` elements."""
    size = tensor.itemsize
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and not tensor.is_neg()
        and tensor.data_ptr() % size == 0
        and (tensor.storage_offset() + count) * size <= tensor.untyped_storage().nbytes()
    )


def output(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor that a kernel writes.

    Raises:
        ContractError: it has another dtype than the kernel's, which may be of more bytes.
    """
    if tensor.dtype != dtype:
        raise ContractError(f"a kernel would write {dtype} to a tensor of {tensor.dtype}")
    return tensor.data_ptr()


_PLAIN = (Tensor, torch.nn.Parameter)


def layout(k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return what decides much of what is refused of K and V."""
    return k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride()


@dataclass(frozen=True)
class CacheLayout:
    """K and V `[pages, page_size, Hk, D]` of one layout, which was checked. It keeps no memory of a cache."""

    k_extent: int
    v_extent: int
    view: bytes
    """Shape and strides (`CACHE_VIEW`)."""

    @staticmethod
    def of(k: Tensor, v: Tensor) -> CacheLayout:
        view = CACHE_VIEW.pack(*k.shape, 0, *k.stride()[:3], 0, *v.stride()[:3], v.shape[3])
        return CacheLayout(extent(k), extent(v), view)

    def held_by(self, k: Tensor, v: Tensor) -> bool:
        """Return whether two tensors of this layout are ordinary and have the memory."""
        return holds(k, self.k_extent) and holds(v, self.v_extent)

    def storage(self, k: Tensor, v: Tensor) -> bytes:
        """The cache's struct but for the page table: as long as the tensors live."""
        return CACHE_STORAGE.pack(k.data_ptr(), self.k_extent, v.data_ptr(), self.v_extent) + self.view
