"""The tensor map of the Hopper kernels over a paged cache, as `PageBoxes` of mojo_ops/cache/tensor_map.mojo has it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PageBoxes:
    """A map whose box holds a head of some slots of a page; innermost dimension first, strides in bytes."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one to the next of all dimensions but the innermost."""
    sides: tuple[int, ...]
    """The sizes of the box."""
    head_step: int
    """From one head to the next in the third dimension."""

    @staticmethod
    def of(view: np.ndarray, slots: int) -> "PageBoxes":
        """Return the boxes of `slots` (a multiple of 8) of `[page, slot, head, dim]` with elements of 1 or 2 bytes."""
        (pages, page_size, heads, dim), (page, slot, head, element) = view.shape, view.strides
        # A row of the box: 128 bytes, which are swizzled; of 8-bit elements the whole head.
        atom, stride = (64, 128) if element == 2 else (dim, head)
        step = head // stride
        return PageBoxes(
            (atom, 8, (heads - 1) * step + dim // atom, page_size // 8, pages),
            (slot, stride, 8 * slot, page),
            (atom, 8, dim // atom, slots // 8, 1),
            step,
        )
