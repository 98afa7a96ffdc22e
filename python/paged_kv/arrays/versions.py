"""The versions by which torch's autograd knows that a tensor was written since it was saved for a backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


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
