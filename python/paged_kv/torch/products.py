"""Linear layers of torch's tensors, by a library of kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paged_kv.arrays.host import HOST
from paged_kv.call_layouts import LINEAR, MEMBER
from paged_kv.calls.plan import check_dtype
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.runtime.libraries import kernel
from paged_kv.runtime.thread_pool import workers
from paged_kv.torch.memory import holds, output

(_MEMBER,), (_CALL,) = MEMBER.parts("y w n row_bytes encoding"), LINEAR.parts("members count x m k")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MOST_EXPANDED = 2**28
"""Elements of a tensor of which some share memory, by a stride of 0: it is copied, and can have more than fit."""


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """`x w^T` of x `[M, K]` and w `[N, K]`, accumulated in float32: `[M, N]` in their dtype.

    Raises:
        ContractTypeError, ShapeError: a tensor has another dtype or shape, or is expanded to over 2^28 elements.
    """
    if not (
        x.dtype == w.dtype
        and x.dtype in _NAMES
        and x.dim() == w.dim() == 2
        and x.shape[1] == w.shape[1]
        and x.is_contiguous()
        and w.is_contiguous()
        and holds(x, x.numel())
        and holds(w, w.numel())
    ):
        x, w = _checked(x, w)
    (m, k), n = x.shape, w.shape[0]
    if 0 in (m, n, k):
        return torch.zeros((m, n), dtype=x.dtype, device=x.device)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    member = ctypes.create_string_buffer(_MEMBER.pack(output(y, x.dtype), w.data_ptr(), n, 0, 0))
    name = _NAMES[x.dtype]
    kernel("linear", name, name)(_CALL.pack(ctypes.addressof(member), 1, x.data_ptr(), m, k) + workers())
    return y


def _checked(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both as contiguous tensors, or an error."""
    weight, rows = HOST.view(w, "w"), HOST.view(x, "x")
    check_dtype("w: dtype", weight.dtype)
    if weight.ndim != 2:
        raise ShapeError(f"w: expected 2 dimensions, got shape {weight.shape}")
    if rows.dtype != weight.dtype:
        raise ContractTypeError(f"x: dtype {rows.dtype.name}, the weight's is {weight.dtype.name}")
    if rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
        raise ShapeError(f"x: expected [M, {weight.shape[1]}] for this weight, got shape {rows.shape}")
    for view, name in ((rows, "x"), (weight, "w")):
        if view.size > _MOST_EXPANDED and 0 in view.strides:
            raise ShapeError(f"{name} is expanded to over 2^28 elements, its shape is {view.shape}")
    return HOST.like(x, HOST.contiguous(rows)), HOST.like(w, HOST.contiguous(weight))
