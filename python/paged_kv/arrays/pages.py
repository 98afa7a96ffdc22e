"""The memory of a paged cache: K and V as views of pages, what is refused of them, and how the ops get them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from paged_kv.arguments import one_of
from paged_kv.arrays.dtypes import RAW
from paged_kv.arrays.host import HOST
from paged_kv.arrays.overlap import Named, check_disjoint, check_no_overlap_in
from paged_kv.arrays.types import ArrayDevice, Operand
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

Storage: TypeAlias = tuple[Operand, Operand, np.ndarray]
"""Flat memory of K and of V, and the numbers of `view` (`mojo_ops/ops.mojo`) on the host."""
_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape, and strides in bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Pages:
    """K and V in pages: views `[page, slot, kv_head, head_dim]` of the memory of one device, with any strides that are
    not negative, the last one 1. Nothing is copied.
    """

    k: Any
    v: Any
    """As k, but for its head_dim."""
    device: ArrayDevice = HOST
    name: str = "paged_kv_cache"
    """The name of the cache in messages."""

    @staticmethod
    def of(
        paged_kv_cache: Any,
        kv_layout: str,
        name: str = "paged_kv_cache",
        *,
        device: ArrayDevice = HOST,
        writable: bool = False,
        same_width: bool = True,
        one_slot: bool = False,
        names: tuple[str, str] | None = None,
    ) -> Pages:
        """The pages of a cache as callers give it.

        Args:
            paged_kv_cache: One array NHD `[pages, 2, page_size, Hk, D]` or HND `[pages, 2, Hk, page_size, D]`, or a
                tuple `(k, v)` of such arrays without the 2. Any strides that are not negative, the last one 1.
            kv_layout: "NHD" or "HND".
            name: What a message calls the cache.
            device: Where it lies.
            writable: Refuses memory that cannot be written, or in which two elements are one.
            same_width: Whether K and V must have one head_dim.
            one_slot: Whether page_size is 1: the arrays may then be without that dimension.
            names: What messages call K and V of a tuple; None: `name` with an index.

        Raises:
            ContractTypeError: an array that `device.view` refuses, or K and V differ in dtype.
            ShapeError: the rank is wrong, dimension 1 is not 2, or K and V differ in shape.
            ContractError: unknown `kv_layout`, a stride as above, not `writable`.
        """
        check_layout(kv_layout)
        if isinstance(paged_kv_cache, tuple | list):
            if len(paged_kv_cache) != 2:
                raise ShapeError(f"{name}: expected a tuple of K and V, got {len(paged_kv_cache)} arrays")
            names = names or (f"{name}[0]", f"{name}[1]")
            k, v = (device.view(array, of) for array, of in zip(paged_kv_cache, names, strict=True))
            if one_slot:
                k, v = (_with_slot(view, kv_layout) if view.ndim == 3 else view for view in (k, v))
            for view, of in ((k, names[0]), (v, names[1])):
                check_storage(device, view, of, 4, writable=writable)
            check_alike(v, k, names[1], f"{names[0]}'s", same_width)
            if writable:
                check_disjoint(device, names[1], v, [(names[0], k)])
        else:
            both = device.view(paged_kv_cache, name)
            if one_slot and both.ndim == 4:
                both = _with_slot(both, kv_layout)
            check_storage(device, both, name, 5, writable=writable)
            if both.shape[1] != 2:
                raise ShapeError(f"{name}: expected 2 (K and V) in dimension 1, got shape {list(both.shape)}")
            k, v = both[:, 0], both[:, 1]
        if kv_layout == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return Pages(k, v, device, name)

    @staticmethod
    def of_tokens(k: Any, v: Any, device: ArrayDevice, page_size: int) -> Pages:
        """Pages that begin at every token of `[N, Hk, D]` and overlap, `N - page_size + 1` of them; with fewer tokens
        than `page_size`, none.
        """
        return Pages(overlapping_pages(k, page_size), overlapping_pages(v, page_size), device)

    @staticmethod
    def of_one(k: Any, v: Any, device: ArrayDevice, name: str = "paged_kv_cache") -> Pages:
        """One page of all tokens `[N, Hk, D]`; where there are none, no page, of one slot."""
        return Pages(k[None], v[None], device, name) if len(k) else Pages(k[:, None], v[:, None], device, name)

    @property
    def num_pages(self) -> int:
        return int(self.k.shape[0])

    @property
    def page_size(self) -> int:
        return int(self.k.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements; of codes, that of their memory."""
        return self.device.dtype(self.k)

    def named(self) -> list[Named]:
        """K and V as messages call them."""
        return [(self.name, self.k), (self.name, self.v)]

    def layout(self) -> tuple[Any, ...]:
        """Equal for pages of the same memory."""
        k, v, device = self.k, self.v, self.device
        return device, device.address(k), device.address(v), device.strides(k), device.strides(v), k.shape, v.shape

    def operands(self) -> Storage:
        """The memory as the ops take it. The numbers of `view` are 12, and V's head_dim where it is not K's."""
        k, v = ((tuple(view.shape), tuple(self.device.strides(view))) for view in (self.k, self.v))
        k_extent, v_extent, numbers = _described(k, v, self.k.itemsize)
        return self.device.flat(self.k, k_extent), self.device.flat(self.v, v_extent), numbers


def check_layout(kv_layout: str) -> None:
    """Refuses an unknown layout.

    Raises:
        ContractError: it is neither "NHD" nor "HND".
    """
    one_of("kv_layout", kv_layout, ("NHD", "HND"))


def token_views(
    device: ArrayDevice,
    kv: tuple[Any, Any],
    kv_layout: str,
    names: tuple[str, str] = ("k", "v"),
    *,
    same_width: bool = True,
) -> tuple[Any, Any]:
    """K and V of contiguous tokens as `[N, Hk, D]` views.

    Raises:
        ContractTypeError, ShapeError, ContractError: the layout is unknown; an array is none, not of rank 3, or has
            strides that the ops cannot address; or the two differ in dtype or shape, the last dimension left out unless
            `same_width`.
    """
    check_layout(kv_layout)
    k, v = (device.view(array, name) for array, name in zip(kv, names, strict=True))
    check_storage(device, k, names[0], 3)
    check_storage(device, v, names[1], 3)
    check_alike(v, k, names[1], f"{names[0]}'s", same_width)
    return (k, v) if kv_layout == "NHD" else (k.swapaxes(0, 1), v.swapaxes(0, 1))


def _with_slot(view: Any, kv_layout: str) -> Any:
    """A view with a dimension of page_size 1."""
    return view[..., None, :, :] if kv_layout == "NHD" else view[..., None, :]


def check_alike(view: Any, other: Any, name: str, others: str, same_width: bool = True) -> None:
    """Refuses two views of different dtypes or shapes, the last dimension left out unless `same_width`; a message says
    "`others` float32".
    """
    if view.dtype != other.dtype:
        got, expected = (str(dtype).removeprefix("torch.") for dtype in (view.dtype, other.dtype))
        raise ContractTypeError(f"{name}: expected {others} dtype {expected}, got {got}")
    if view.shape != other.shape and (same_width or view.shape[:-1] != other.shape[:-1]):
        raise ShapeError(f"{name}: expected {others} shape {list(other.shape)}, got {list(view.shape)}")


def overlapping_pages(tokens: Any, page_size: int) -> Any:
    """Pages `[N - page_size + 1, page_size, Hk, D]`, one from each token of `[N, Hk, D]` on: a view, without a copy.

    With fewer tokens than `page_size` there are none.
    """
    if len(tokens) < page_size:
        return tokens[:0].reshape(0, page_size, *tokens.shape[1:])
    if not isinstance(tokens, np.ndarray):
        return tokens.unfold(0, page_size, 1).permute(0, 3, 1, 2)
    dtype: np.dtype[Any] = tokens.dtype
    raw = tokens.view(RAW.get(dtype, dtype))  # as_strided does not know float8_e5m2
    shape = (len(tokens) - page_size + 1, page_size, *tokens.shape[1:])
    return np.lib.stride_tricks.as_strided(raw, shape, (raw.strides[0], *raw.strides)).view(dtype)


def check_storage(device: ArrayDevice, view: Any, name: str, ndim: int, *, writable: bool = False) -> None:
    """Refuses storage that the ops cannot address.

    Raises:
        ShapeError: its rank is not `ndim`.
        ContractError: a stride is negative, the last one is not 1, elements are not aligned; or, where it is to be
            written, it is read-only or two of its elements are one.
    """
    if view.ndim != ndim:
        raise ShapeError(f"{name}: expected {ndim} dimensions, got shape {list(view.shape)}")
    if writable and not device.is_writable(view):
        raise ContractError(f"{name} is read-only and would be written in place (JAX arrays: see paged_kv.cache)")
    if not math.prod(view.shape):
        return
    strides = device.strides(view)
    moving = [stride for size, stride in zip(view.shape, strides, strict=True) if size > 1]
    if min(moving, default=0) < 0 or not device.is_aligned(view):
        raise ContractError(f"{name} has a negative stride or unaligned elements: strides {strides} bytes")
    if view.shape[-1] > 1 and strides[-1] != view.itemsize:
        stride = strides[-1] // view.itemsize
        raise ContractError(f"{name}: the elements of a head must lie side by side, their stride is {stride}")
    if writable:
        check_no_overlap_in(device, name, view)


@lru_cache(1024)
def _described(k: _Layout, v: _Layout, itemsize: int) -> tuple[int, int, np.ndarray]:
    """Elements from the first to the last of K and of V, and the numbers of `view`; strides are in bytes."""
    numbers, extents = list(k[0]), []
    for shape, strides in (k, v):
        steps = [stride // itemsize for stride in strides]
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        extents.append(1 + last if math.prod(shape) else 0)
        numbers += [0, *steps[:3]]
    if v[0][3] != k[0][3]:
        numbers.append(v[0][3])
    return extents[0], extents[1], np.array(numbers, np.int64)
