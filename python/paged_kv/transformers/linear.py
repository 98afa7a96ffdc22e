"""The linear layers of a bfloat16 model, for few rows: this package's op, on the threads that its attention runs on.

Two pools of threads, torch's and MAX's, share the cores. Each spins for a while after its work, so that a change from
one to the other costs up to a millisecond where both have a thread a core. A forward pass of few rows therefore runs
torch's own ops on one thread, and all that is heavy on MAX's; a prompt's runs on as many as torch was set to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paged_kv.calls.linear import Weight

MOST_ROWS = 16
"""More rows are computed by torch: a prompt's."""
_LEAST_ELEMENTS = 1 << 16


def replace(model: nn.Module) -> Callable[[], None]:
    """Makes the linear layers of a model compute few rows by this package's op; returns what takes that back."""
    replaced = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_served(module.weight)
    ]
    for module in replaced:
        module.__dict__["forward"] = _Forward(module)
    threads = _Threads()
    hooks = [threads.hook_into(model)] if replaced else []

    def restore() -> None:
        for module in replaced:
            module.__dict__.pop("forward", None)
        for remove in hooks:
            remove()

    return restore


def _is_served(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() >= _LEAST_ELEMENTS
    )


class _Threads(threading.local):
    """torch's threads in a forward pass of few rows: one. Each thread that runs the model has a number of its own."""

    before: int | None = None

    def hook_into(self, model: nn.Module) -> Callable[[], None]:
        """Returns what removes the hooks."""
        first = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        last = model.register_forward_hook(self._end, always_call=True)

        def remove() -> None:
            first.remove()
            last.remove()

        return remove

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor) and tokens.numel() <= MOST_ROWS and self.before is None:
            self.before = torch.get_num_threads()
            torch.set_num_threads(1)

    def _end(self, *_: Any) -> None:
        if self.before is not None:
            torch.set_num_threads(self.before)
            self.before = None


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
        served = 0 < rows <= MOST_ROWS and x.dtype == weight.dtype and weight.is_contiguous()
        if not served or torch.is_grad_enabled():
            return nn.functional.linear(x, weight, module.bias)
        seen = weight.data_ptr(), weight.shape, weight.stride()
        if self._weight is None or seen != self._seen:
            self._weight, self._seen = Weight(weight), seen
        y: Tensor = self._weight.apply(x.reshape(rows, x.shape[-1]))
        if module.bias is not None:
            y += module.bias
        return y.view(*x.shape[:-1], y.shape[-1])
