"""Every public call gives the same bits whatever torch's default dtype and device are."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.arrays.host import as_numpy
from support.calls import CALLS, IN_BUFFERS, OPERATORS, Call

pytestmark = pytest.mark.usefixtures("all_variants")

DEFAULTS = (torch.bfloat16, torch.float16, torch.float64, torch.device("meta"))


@contextmanager
def default(value: torch.dtype | torch.device) -> Iterator[None]:
    if isinstance(value, torch.device):
        with value:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors(argument: Any) -> Any:
    """Copies of arrays as torch tensors, those of lists too."""
    if isinstance(argument, list):
        return [tensors(one) for one in argument]
    if isinstance(argument, np.ndarray):
        return torch.from_numpy(argument.copy())
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


def contents(found: Any) -> list[Any]:
    """The kind, dtype, shape and bytes of every array that a result holds."""
    if hasattr(found, "__dlpack__"):
        array = as_numpy(found, "result")
        return [(type(found), array.dtype, array.shape, array.tobytes())]
    if dataclasses.is_dataclass(found):
        found = [getattr(found, field.name) for field in dataclasses.fields(found)]
    if isinstance(found, tuple | list):
        return [one for held in found for one in contents(held)]
    return contents(found.kv_cache) if hasattr(found, "kv_cache") else []


def outcome(call: Call) -> list[Any]:
    """Return what a call with torch's tensors returns and writes, and a run of what it planned."""
    function, given = call.make(), {name: tensors(one) for name, one in call.arguments().items()}
    found = function(*given.pop("args", ()), **given)
    of_plan = call.runs(function.__self__) if call.runs else None
    return contents([found, of_plan, *given.values()])


@pytest.mark.parametrize("call", [*CALLS, *IN_BUFFERS, *OPERATORS], ids=lambda call: call.name)
def test_defaults_of_torch_change_nothing(call: Call) -> None:
    expected = outcome(call)
    for value in DEFAULTS:
        with default(value):
            assert outcome(call) == expected, value
