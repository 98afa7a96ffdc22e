"""The pages of a cache inside a graph, as the ops take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorValue, ops

from paged_kv import options
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_rank, check_value, show
from paged_kv.kv_formats import FORMATS, KVFormat

KVLayout = Literal["NHD", "HND", "STRIDED"]


DTYPES = tuple(DType[name] for name in options.Q_DTYPES)
"""Dtypes of queries, outputs and linear layers."""
KV_DTYPES = tuple(DType[name] for name in options.KV_DTYPES)
"""Dtypes of a cache that attention reads."""
CODES: dict[DType, KVFormat] = {DType[memory]: codes for memory, codes in FORMATS.items()}
"""Caches of codes, by the dtype of their memory."""
BITS = (DType.uint8, DType.uint16, DType.uint32)
"""Append and gather, which only copy rows, take a cache of any dtype as the one of these of its size."""


def cache_dtype(dtype: DType, kv_format: KVFormat | None) -> DType:
    """The dtype of a cache's memory: `dtype`, or that of codes."""
    return next((memory for memory, codes in CODES.items() if codes == kv_format), dtype)


@dataclass(frozen=True)
class PagedCache:
    """The pages of a cache inside a graph, with the table that says which request owns which.

    `k_blocks` and `v_blocks` are graph buffers in one of the storage layouts:

    * rank 4, two buffers: NHD `[pages, page_size, Hk, D]` or HND `[pages, Hk, page_size, D]`;
    * rank 5, one buffer given twice: `[pages, 2, ...]`;
    * rank 6, one buffer given twice, all layers: NHD `[pages, 2, layers, page_size, Hk, D]`;
    * rank 1, two buffers, kv_layout "STRIDED": flat memory whose shape and strides are told at run time by
      `view`, `[12]` or `[13]` int64 on the host (`mojo_ops/ops.mojo`); every size of the cache is then unknown here.

    A cache of codes has a scale with every head (`mojo_ops/cache/README.md`): the last dimension of its memory is
    `options.stored_head`, its dtype the format's memory. Of uint8, `kv_format` tells codes from the bits of a cache.

    `lookup_table` is `[B, max_pages]` uint32. All of it lies on one device, which is where the ops over it run.
    """

    k_blocks: BufferValue
    v_blocks: BufferValue
    lookup_table: TensorValue
    kv_layout: KVLayout = "NHD"
    view: TensorValue | None = None
    kv_format: KVFormat | None = None

    def __post_init__(self) -> None:
        for name in ("k_blocks", "v_blocks"):
            blocks = getattr(self, name)
            if not isinstance(blocks, BufferValue):
                raise ContractTypeError(
                    f"{name}: expected a graph buffer (BufferType input), got {type(blocks).__name__}"
                )
        k, v = self.k_blocks, self.v_blocks
        check_dtype("k_blocks", k.dtype, [*dict.fromkeys((*KV_DTYPES, *BITS, *CODES))])
        if self.kv_format is None and k.dtype not in BITS:
            object.__setattr__(self, "kv_format", CODES.get(k.dtype))
        if self.kv_format is not None and CODES.get(k.dtype) != self.kv_format:
            raise ContractTypeError(f"kv_format: expected one of buffers of {k.dtype.name}, got {self.kv_format!r}")
        if v.dtype != k.dtype:
            raise ContractTypeError(f"v_blocks: expected dtype {k.dtype.name}, as k_blocks, got {v.dtype.name}")
        if v.device != k.device:
            raise ContractError(f"v_blocks: expected device {k.device}, as k_blocks, got {v.device}")
        self.check("lookup_table", self.lookup_table, DType.uint32, [None, None])
        if self.kv_layout == "STRIDED":
            self._check_strided()
        else:
            self._check_contiguous()

    def _check_strided(self) -> None:
        for name in ("k_blocks", "v_blocks"):
            check_rank(name, getattr(self, name), 1)
        if self.view is None:
            raise ContractError("view: required where kv_layout is 'STRIDED'")
        check_value("view", self.view, DType.int64, [None], DeviceRef.CPU())
        if self.view.shape[0] not in (Dim(12), Dim(13)) and isinstance(self.view.shape[0], StaticDim):
            raise ShapeError(f"view: expected 12 or 13 numbers, got {self.view.shape[0]}")

    def _check_contiguous(self) -> None:
        k, v = self.k_blocks, self.v_blocks
        if self.kv_layout not in ("NHD", "HND"):
            raise ContractError(f"kv_layout: expected 'NHD' or 'HND', got {self.kv_layout!r}")
        check_rank("k_blocks", k, 4, 5, 6)
        if list(v.shape) != list(k.shape):
            raise ShapeError(f"v_blocks: expected shape {show(k.shape)}, as k_blocks, got {show(v.shape)}")
        if k.rank == 6 and self.kv_layout != "NHD":
            raise ContractError(f"kv_layout: expected 'NHD' of a buffer of all layers (rank 6), got {self.kv_layout!r}")
        if k.rank >= 5 and k.shape[1] != Dim(2):
            raise ShapeError(f"k_blocks: expected dimension 1 to be 2 (K and V), got {k.shape[1]}")
        _ = self.head_dim  # of codes, which not all sizes hold

    @staticmethod
    def of(
        blocks: BufferValue,
        lookup_table: TensorValue,
        kv_layout: KVLayout = "NHD",
        kv_format: KVFormat | None = None,
    ) -> PagedCache:
        """The cache whose one buffer holds K and V (rank 5 or 6)."""
        return PagedCache(blocks, blocks, lookup_table, kv_layout, kv_format=kv_format)

    @property
    def dtype(self) -> DType:
        return self.k_blocks.dtype

    @property
    def device(self) -> DeviceRef:
        return self.k_blocks.device

    @property
    def num_kv_heads(self) -> Dim | None:
        """KV heads; None where the storage is strided."""
        axis = {"NHD": -2, "HND": -3}.get(self.kv_layout)
        return None if axis is None else self.k_blocks.shape[axis]

    @property
    def head_dim(self) -> Dim | None:
        """Elements of a head; None where the storage is strided, or holds codes and their number is symbolic."""
        if self.kv_layout == "STRIDED":
            return None
        stored = self.k_blocks.shape[-1]
        if self.kv_format is None:
            return stored
        return (
            Dim(options.stored_elements(self.kv_format, int(stored), "k_blocks"))
            if isinstance(stored, StaticDim)
            else None
        )

    def takes(self, dtype: DType) -> bool:
        """Return whether rows of this dtype are appended to the cache and come out of it: its own, or any float over
        codes.
        """
        return dtype == self.dtype if self.kv_format is None else dtype in DTYPES

    def operands(self, layer: int) -> list[BufferValue | TensorValue]:
        """Return what every op over pages takes after its own tensors."""
        layers = self.k_blocks.shape[2] if self.k_blocks.rank == 6 else Dim(1)
        if layer < 0 or (isinstance(layers, StaticDim) and layer >= layers.dim):
            raise ContractError(f"layer: expected one of the cache's {layers} layers, got {layer}")
        view = self.view
        if view is None:
            view = constant(np.array([layer], np.int64))
        return [self.k_blocks, self.v_blocks, self.lookup_table, view]

    def check(self, name: str, value: TensorValue, dtype: DType, shape: Sequence[Dim | None]) -> None:
        """Refuses an argument that has another dtype or shape (None = any), or does not lie with the cache."""
        check_value(name, value, dtype, shape, self.device)

    @staticmethod
    def size(name: str, requested: Dim | str | int | None, actual: Dim | None) -> Dim:
        """A size of the cache, from the caller where the storage is strided; both where they agree."""
        if actual is None:
            if requested is None:
                raise ContractError(f"{name}: required where kv_layout is 'STRIDED'")
            return Dim(requested)
        if requested is not None and Dim(requested) != actual:
            raise ShapeError(f"{name}: expected {actual}, as in the cache, got {requested}")
        return actual


def constant(values: np.ndarray, device: DeviceRef | None = None) -> TensorValue:
    """Numbers that are part of the graph, on the host where no device is given."""
    return ops.constant(values, DType.from_numpy(values.dtype), device or DeviceRef.CPU())
