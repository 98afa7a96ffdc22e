"""The linear layers of a bfloat16 model, for few rows: this package's, on the threads that torch's own ops run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged_kv.torch.products import multiply

MOST_ROWS = 32
"""More rows are computed by torch: a prompt's."""
_LEAST_ELEMENTS = 1 << 16


def replace(model: nn.Module, undo: list[Callable[[], Any]]) -> None:
    """Makes the linear layers of a model compute few rows by this package's kernel.

    What takes a change back is in `undo` before it is made, so that an exception from outside leaves none behind.
    """
    replaced = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_served(module.weight)
    ]
    for module in replaced:
        undo.append(partial(module.__dict__.pop, "forward", None))
        module.__dict__["forward"] = partial(_forward, module)


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
    if not served or torch.is_grad_enabled():
        return nn.functional.linear(x, weight, module.bias)
    y = multiply(x.reshape(rows, x.shape[-1]), weight)
    if module.bias is not None:
        y += module.bias
    return y.view(*x.shape[:-1], y.shape[-1])
