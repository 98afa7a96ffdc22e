"""The linear layers of a bfloat16 model, for few rows: this package's op, on the threads that its attention runs on.

Two pools of threads, torch's and MAX's, share the cores. Each spins for a while after its work, so that every change
from one to the other costs up to a millisecond where both have a thread a core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paged_kv.calls.linear import Weight

MOST_ROWS = 32
"""More rows are computed by torch: a prompt's."""
_LEAST_ELEMENTS = 1 << 16


def replace(model: nn.Module) -> None:
    """Makes the linear layers of a model compute few rows by this package's op, until `restore`."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_served(module.weight):
            module.forward = _Forward(module)


def restore(model: nn.Module) -> None:
    """Takes back what `replace` did."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Forward):
            del module.forward


def _is_served(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() >= _LEAST_ELEMENTS
    )


class _Forward:
    """`forward` of one linear layer."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._seen: tuple[Any, ...] = ()
        self._weight: Weight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        weight = module.weight
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        if not 0 < rows <= MOST_ROWS or x.dtype != weight.dtype or torch.is_grad_enabled():
            return nn.functional.linear(x, weight, module.bias)
        seen = weight.data_ptr(), weight.shape, weight.stride()
        if self._weight is None or seen != self._seen:
            self._weight, self._seen = Weight(weight), seen
        y: Tensor = self._weight.apply(x.reshape(rows, x.shape[-1]))
        if module.bias is not None:
            y += module.bias
        return y.view(*x.shape[:-1], y.shape[-1])
