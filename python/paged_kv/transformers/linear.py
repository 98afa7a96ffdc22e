"""The linear layers of a bfloat16 model, for few rows: this package's, on the threads that torch's own ops run on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from paged_kv.torch.products import multiply
from paged_kv.transformers import running

MOST_ROWS = 32
"""More rows are computed by torch: a prompt's."""
_LEAST_ELEMENTS = 1 << 16


_lock = threading.RLock()
_running: dict[int, set[object]] = {}
"""By the id of a model: the calls that run on its replaced layers."""


@contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    """Let calls on pages compute few rows of a model's linear layers by this package's kernel.

    Other threads have torch's layers meanwhile. The last of a model's calls takes the change back.
    """
    call = object()
    try:
        with _lock:
            _running.setdefault(id(model), set()).add(call)
            for module in model.modules():
                if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_served(module.weight):
                    module.__dict__["forward"] = partial(_forward, module)
        yield
    finally:
        try:
            _release(model, call)
        finally:
            _release(model, call)  # the first one may have been interrupted


def _release(model: nn.Module, call: object) -> None:
    with _lock:
        calls = _running.get(id(model), set())
        calls.discard(call)
        if not calls:
            for module in model.modules():
                if is_served_by(module.__dict__.get("forward")):
                    del module.__dict__["forward"]
            _running.pop(id(model), None)


def is_served_by(forward: object) -> bool:
    """Return whether a module's own `forward` is this package's."""
    return getattr(forward, "func", None) is _forward


def _is_served(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() >= _LEAST_ELEMENTS
    )


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """`forward` of one linear layer."""
    weight = module.weight
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    served = 0 < rows <= MOST_ROWS and x.dtype == weight.dtype and weight.is_contiguous()
    if not served or torch.is_grad_enabled() or not running.on_pages():
        return nn.functional.linear(x, weight, module.bias)
    y = multiply(x.reshape(rows, x.shape[-1]), weight)
    if module.bias is not None:
        y += module.bias
    return y.view(*x.shape[:-1], y.shape[-1])
