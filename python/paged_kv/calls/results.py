"""The results of an attention call: o and the lse, in the user's arrays or in arrays of the kind of q."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import flag, one_of
from paged_kv.arrays.autograd_writes import mark_written, refuse_gradients
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.plan import check_array
from paged_kv.errors import ContractError

LSE_BASES = ("log2", "ln")
LSE_LAYOUTS = ("NH", "HN")

NOT_WRITTEN = (None, None)
"""The views where there is no array to write to."""

_FLOAT32 = np.dtype(np.float32)
_LN2 = math.log(2)


@dataclass(slots=True, eq=False)
class Results:
    """The results of a run, and the arrays they are written to. Letters in shapes: R rows, H query heads, D the width
    of o.

    Raises:
        ContractTypeError: `return_lse` is no truth value.
        ContractError: `lse_base` or `lse_layout` is unknown.
    """

    return_lse: Any = False
    """True if the lse is returned as well."""
    out: Any = None
    """`[R, H, D]` in the planned dtype: written, and returned as o."""
    lse: Any = None
    """`[R, H]` float32 (`[H, R]` for "HN"): written, and returned as the lse."""
    lse_base: str = "log2"
    lse_layout: str = "NH"

    def __post_init__(self) -> None:
        self.return_lse = flag("return_lse", self.return_lse)
        one_of("lse_base", self.lse_base, LSE_BASES)
        one_of("lse_layout", self.lse_layout, LSE_LAYOUTS)

    @property
    def are_written(self) -> bool:
        """True if there is an array to write to."""
        return self.out is not None or self.lse is not None

    def views(
        self, device: ArrayDevice, shape: Sequence[int], dtype: np.dtype[Any], read: Sequence[Named], rows: str
    ) -> tuple[Any, Any]:
        """Views of `out` and `lse`, which can take o `[R, H, D]` of `dtype` and its lse; None for each that is None.

        Args:
            device: The device of the call.
            shape: The shape of o.
            dtype: The dtype of o.
            read: The other arrays of the call.
            rows: What messages call R.

        Raises:
            ContractTypeError, ShapeError: an array has another dtype or shape, or requires a gradient.
            ContractError: it is read-only, or shares memory with itself or with another argument.
        """
        lse_shape = tuple(shape[:2]) if self.lse_layout == "NH" else (shape[1], shape[0])
        refuse_gradients(out=self.out, lse=self.lse)
        views = []
        for name, array, planned, of in (("out", self.out, shape, dtype), ("lse", self.lse, lse_shape, _FLOAT32)):
            view = None if array is None else device.view(array, name)
            if view is not None:
                check_array(device, name, view, planned, of, rows)
                if not device.is_writable(view):
                    raise ContractError(f"{name} is read-only, and is to be written")
            views.append((name, view))
        check_written(device, [(name, view) for name, view in views if view is not None], read)
        return views[0][1], views[1][1]

    def hand_back(self, device: ArrayDevice, q: Any, o: Any, sums: Any, views: tuple[Any, Any] = NOT_WRITTEN) -> Any:
        """O, or o and the lse, of o `[R, H, D]` and base-2 sums `[R, H]` on the device.

        `views` are those of the arrays that are written; new arrays are of the kind of q.
        """
        if views is not NOT_WRITTEN:
            mark_written((self.out, self.lse))
        if views[0] is not None:
            device.write(views[0], o)
        if self.lse_base == "ln":
            sums = sums * np.float32(_LN2) if device.readable else sums * _LN2
        if self.lse_layout == "HN":
            sums = device.contiguous(sums.swapaxes(0, 1))
        if views[1] is not None:
            device.write(views[1], sums)
        o = device.like(q, o) if self.out is None else self.out
        if not self.return_lse:
            return o
        return o, device.like(q, sums) if self.lse is None else self.lse
