"""A linear layer outside a model's graph, by the op that models use.

Letters in shapes: M rows, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from max.driver import Buffer

from paged_kv.arrays.dtypes import max_dtype
from paged_kv.arrays.host import HOST
from paged_kv.calls.plan import check_dtype
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.runtime.linear_variant import LinearVariant
from paged_kv.runtime.session import runtime_on

_MOST_EXPANDED = 2**28
"""Elements of an array of which some share memory, by a stride of 0: it is copied, and can have more than fit."""


class Weight:
    """A weight `[N, K]` on the host, viewed once; it keeps the memory alive.

    Raises:
        ContractTypeError: the dtype is none of float32, bfloat16 and float16.
        ShapeError: the rank is not 2, or the array is expanded to over 2^28 elements.
    """

    def __init__(self, array: Any, name: str = "w") -> None:
        view = HOST.view(array, name)
        check_dtype(f"{name}: dtype", view.dtype)
        if view.ndim != 2:
            raise ShapeError(f"{name} must have 2 dimensions, its shape is {view.shape}")
        _check_size(view, name)
        self.shape, self.dtype = view.shape, view.dtype
        self._variant = LinearVariant(max_dtype(view.dtype))
        self._buffer: Buffer = HOST.buffer(HOST.contiguous(view))

    def apply(self, x: Any) -> Any:
        """`x w^T` of x `[M, K]` in the weight's dtype: `[M, N]`, accumulated in float32, in the kind of x.

        Raises:
            ContractTypeError, ShapeError: x is of another dtype or shape.
        """
        view = HOST.view(x, "x")
        if view.dtype != self.dtype:
            raise ContractTypeError(f"x: dtype {view.dtype.name}, the weight's is {self.dtype.name}")
        if view.ndim != 2 or view.shape[1] != self.shape[1]:
            raise ShapeError(f"x must be [M, {self.shape[1]}] for this weight, its shape is {view.shape}")
        _check_size(view, "x")
        if 0 in (*view.shape, *self.shape):
            return HOST.like(x, np.zeros((len(view), self.shape[0]), self.dtype))
        (y,) = runtime_on(None).execute(self._variant, HOST.buffer(HOST.contiguous(view)), self._buffer)
        return HOST.like(x, HOST.take(y))


def _check_size(view: Any, name: str) -> None:
    if view.size > _MOST_EXPANDED and 0 in view.strides:
        raise ShapeError(f"{name} is expanded to over 2^28 elements, its shape is {view.shape}")
