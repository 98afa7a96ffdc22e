"""Values and objects that stand where an array or a number belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Broken:
    """An array whose DLPack methods fail."""

    def __init__(self, device: Any = (1, 0), capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, type):
            raise self.device("no device")
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.capsule, type):
            raise self.capsule("no capsule")
        return self.capsule


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


def freed() -> Any:
    import torch

    tensor = torch.ones(4, 2, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 0.5, 1.5, 2**31, 2**62, 2**63, -(2**63), 10**400, 10**5000, -(10**5000), True, 1j),
    *(math.nan, math.inf, -math.inf, 1e39, -1e39, 1e308, 1e-39, 1e-46, 5e-324, -0.0),
    *(np.float32(2), np.int64(3), np.bool_(True), np.float64("nan")),
)
OTHERS: tuple[Any, ...] = (
    *(
        None,
        "NHD",
        "HND",
        "ALIBI",
        "float16",
        "",
        b"",
        [],
        (),
        {},
        [1.0],
        (None, None),
        object,
        memoryview(b"abcdefgh"),
    ),
    *(np.ndarray, np.float32, np.zeros(()), np.zeros(2), np.zeros((2, 3), object), np.zeros(3, "i4,f4")),
    np.ma.masked_array(np.ones((2, 3, 64), np.float32), mask=True),
)


def objects() -> list[Callable[[], Any]]:
    """One function a thing, since some are used up by a call."""
    import torch

    devices = ((1, 0), (2, 0), (99, 0), None, "x", (), ValueError, KeyError)
    return [
        *(lambda value=value: value for value in (*NUMBERS, *OTHERS, torch.Tensor, torch.float32)),
        *(
            lambda device=device, capsule=capsule: Broken(device, capsule)
            for device in devices
            for capsule in (None, KeyError)
        ),
        Refuses,
        freed,
        lambda: torch.zeros(2, 3, device="meta"),
        lambda: torch.zeros(3, 3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, 3, 64, requires_grad=True),
        lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
        lambda: torch.tensor(3),
    ]
