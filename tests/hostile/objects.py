"""Values and objects that stand where an array or a number belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from max.driver import Buffer


class Broken:
    """A DLPack array whose two methods give what they are told; an exception is raised."""

    def __init__(self, device: Any, capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return given(self.device)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        return given(self.capsule)


def given(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


class Refuses:
    """An object of which everything fails."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")

    def __bool__(self) -> bool:
        raise ZeroDivisionError("bool")

    def __index__(self) -> int:
        raise ZeroDivisionError("index")

    def __float__(self) -> float:
        raise ZeroDivisionError("float")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("eq")

    def __hash__(self) -> int:
        raise ZeroDivisionError("hash")

    def __len__(self) -> int:
        raise ZeroDivisionError("len")

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def freed(length: int = 0) -> torch.Tensor:
    tensor = torch.ones(4, 4, 32)
    tensor.untyped_storage().resize_(length)
    return tensor


def shrunk_view() -> torch.Tensor:
    tensor = torch.ones(8, 4, 2, 32)
    view = tensor[2:, :, 1]
    tensor.untyped_storage().resize_(tensor.nbytes - 132)
    return view


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 0.5, 1.5, 2**31, 2**62, 2**63, -(2**63), 10**400, 10**5000, -(10**5000), True, 1j),
    *(math.nan, math.inf, -math.inf, 1e39, -1e39, 1e308, 1e-39, 1e-46, 5e-324, -0.0),
    *(np.float32(2), np.int64(3), np.bool_(True), np.float64("nan")),
)
OTHERS: tuple[Any, ...] = (
    *("NHD", "HND", "ALIBI", "float16", "", b"", [], (), {}, (None, None), object, memoryview(b"abcdefgh")),
    *(np.float32, np.zeros(()), np.zeros(2), torch.float32),
    np.ma.masked_array(np.ones((2, 3, 64), np.float32), mask=True),
)


NO_ARRAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a list": lambda: [[1.0]],
    "a class of arrays": lambda: np.ndarray,
    "torch's class": lambda: torch.Tensor,
    "MAX's class": lambda: Buffer,
    "a float": lambda: 1.0,
    "no attributes": Refuses,
    "a device that raises": lambda: Broken(ValueError("no device\non two lines")),
    "a device that exits": lambda: Broken(StopIteration()),
    "no device": lambda: Broken(None),
    "a device of one number": lambda: Broken((1,)),
    "a device of words": lambda: Broken(("cpu", "0")),
    "a device of its own": lambda: Broken((99, 0)),
    "a capsule that raises": lambda: Broken((1, 0), MemoryError("no memory")),
    "a capsule that raises a key": lambda: Broken((1, 0), KeyError("x")),
    "no capsule": lambda: Broken((1, 0)),
    "a number as capsule": lambda: Broken((1, 0), 42),
    "an array as capsule": lambda: Broken((1, 0), np.ones(3)),
    "objects": lambda: np.array([[None]], object),
    "a structure": lambda: np.zeros((4, 4, 32), "f4,f4"),
    "text": lambda: np.array(["q"]),
    "times": lambda: np.zeros(4, "datetime64[s]"),
    "complex": lambda: np.zeros((4, 4, 32), np.complex64),
    "big endian": lambda: np.zeros((4, 4, 32), ">f4"),
    "freed": freed,
    "shrunk": lambda: freed(16),
    "a shrunk view": shrunk_view,
    "meta": lambda: torch.ones(4, 4, 32, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4, 4, 32), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=torch.jagged),
    "torch complex": lambda: torch.zeros(4, 4, 32, dtype=torch.complex64),
    "a negated view": lambda: torch.zeros(4, 4, 32, dtype=torch.complex64).conj().imag,
}
"""Objects where an array belongs that are none, or none of this package's: refused everywhere."""


def objects() -> list[Callable[[], Any]]:
    """One function a thing, since some are used up by a call."""
    return [
        *(lambda value=value: value for value in (*NUMBERS, *OTHERS)),
        *NO_ARRAYS.values(),
        lambda: Broken((2, 0)),
        lambda: torch.ones(2, 3, 64, requires_grad=True),
        lambda: torch.tensor(3),
    ]
