"""The linear layers of a bfloat16 model, for few rows: this package's op, on the threads that its attention runs on.

Two pools of threads, torch's and MAX's, share the cores. Each spins for a while after its work, so that a change from
one to the other costs up to a millisecond where both have a thread a core. A forward pass of few rows therefore runs
torch's own ops on one thread, and all that is heavy on MAX's; a prompt's runs on as many as torch was set to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged_kv.calls.linear import Weight

MOST_ROWS = 16
"""More rows are computed by torch: a prompt's."""
_LEAST_ELEMENTS = 1 << 16


def replace(model: nn.Module, undo: list[Callable[[], Any]]) -> None:
    """Makes the linear layers of a model compute few rows by this package's op.

    What takes a change back is in `undo` before it is made, so that an exception from outside leaves none behind.
    """
    replaced = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_served(module.weight)
    ]
    for module in replaced:
        undo.append(partial(module.__dict__.pop, "forward", None))
        module.__dict__["forward"] = _Forward(module)
    if replaced:
        _hook_into(model, undo)


def restore_threads() -> None:
    """Gives torch in this thread its number of threads back: Ctrl-C in a forward pass goes past the hook that does."""
    before, _threads.before = _threads.before, None
    if before is not None:
        torch.set_num_threads(before)


def _is_served(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() >= _LEAST_ELEMENTS
    )


class _Threads(threading.local):
    """torch's threads before a forward pass of few rows, while one runs. Each thread that runs a model has its own."""

    before: int | None = None


_threads = _Threads()


def _hook_into(model: nn.Module, undo: list[Callable[[], Any]]) -> None:
    is_hooked = [True]

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        few = isinstance(tokens, Tensor) and tokens.numel() <= MOST_ROWS
        if few and is_hooked and _threads.before is None:
            _threads.before = torch.get_num_threads()
            torch.set_num_threads(1)

    undo.append(is_hooked.clear)
    undo.append(model.register_forward_hook(lambda *_: restore_threads(), always_call=True).remove)
    undo.append(model.register_forward_pre_hook(begin, with_kwargs=True).remove)


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
