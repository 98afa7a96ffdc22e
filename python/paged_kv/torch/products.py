"""Linear layers of torch's tensors: by a library of kernels, or by MAX where there is none."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from paged_kv.calls.linear import Weight
from paged_kv.runtime.native import native_library
from paged_kv.torch.memory import holds, workers

_CALL = struct.Struct("<7q")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """`x w^T` of x `[M, K]` and w `[N, K]`, accumulated in float32: `[M, N]` in their dtype.

    Raises:
        ContractTypeError, ShapeError: a tensor has another dtype or shape.
    """
    name = _NAMES.get(x.dtype)
    fits = name and w.dtype == x.dtype and x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1] and w.is_contiguous()
    library = native_library(name, name) if name and fits and x.numel() and w.numel() else None
    if library is None or not holds(w, w.numel()) or not holds(rows := x.contiguous(), x.numel()):
        found: Tensor = Weight(w).apply(x)
        return found
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty((m, n), dtype=x.dtype)
    library.linear(_CALL.pack(y.data_ptr(), rows.data_ptr(), w.data_ptr(), m, n, k, workers()))
    return y
