"""A call as torch's autograd must know it: tensors that it writes, and gradients that it does not compute."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from paged_kv.errors import ContractTypeError


def mark_written(arrays: Iterable[Any]) -> None:
    """Counts a write to each array that is a torch tensor, which kernels and NumPy's views do not.

    A backward that needs what such a tensor was then raises torch's own error, as after one of torch's in-place
    operations. Tensors of `torch.inference_mode()` have no version, and are saved for no backward.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tensors = [array for array in arrays if isinstance(array, torch.Tensor) and not array.is_inference()]
    if tensors:
        torch.autograd.graph.increment_version(tensors)


def refuse_gradients(**arrays: Any) -> None:
    """Refuses tensors that require a gradient while torch records them: what is computed or written has none.

    Raises:
        ContractTypeError: an array is such a tensor.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, array in arrays.items():
        if isinstance(array, torch.Tensor) and array.requires_grad:
            raise ContractTypeError(
                f"{name} requires a gradient, and paged_kv's operators compute none: call them under"
                " torch.inference_mode() or torch.no_grad()"
            )
