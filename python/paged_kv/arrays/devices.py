"""The device of a call's arrays: on the host, or all of them on one GPU."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from max.driver import Accelerator

from paged_kv.arguments import shown
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import HOST, dlpack_device, reason
from paged_kv.arrays.types import ArrayDevice, Shape
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError

_GPUS = (2, 10)  # DLPack's kDLCUDA and kDLROCM


def device_of(**arrays: Any) -> ArrayDevice:
    """The device that all of some arrays lie on, those that are None left out.

    An argument that is a tuple or list stands for its entries. What is no array counts for the host, where
    `ArrayDevice.view` refuses it.

    Raises:
        ContractTypeError: they lie on different devices, or a DLPack array cannot say on which.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    first, index = "", None
    for name, array in arrays.items():
        if array is None:
            continue
        pair = isinstance(array, tuple | list)
        for i, entry in enumerate(array if pair else (array,)):
            called = f"{name}[{i}]" if pair else name
            number = _gpu_index(entry, called)
            if first and number != index:
                raise ContractTypeError(f"{called} is on {_called(number)}, {first} is on {_called(index)}")
            if not first:
                first, index = called, number
    return HOST if index is None else gpu(index)


def device_named(device: Any) -> ArrayDevice:
    """The device that torch calls so ("cpu", "cuda", "cuda:1", a `torch.device`); the host for None.

    Raises:
        ContractError: it is none of these.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    if device is None:
        return HOST
    names_device = isinstance(device, str) or type(device).__name__ == "device"
    kind, _, index = str(device).partition(":") if names_device else ("", "", "")
    if kind == "cpu":
        return HOST
    if kind != "cuda" or not (index or "0").isdecimal() or len(index) > 4:
        raise ContractError(f"device: expected the CPU or a GPU ('cuda', 'cuda:1'), got {shown(device)}")
    return gpu(int(index or 0))


@cache
def gpu(index: int) -> ArrayDevice:
    """One GPU of this process.

    Raises:
        ToolchainError: MAX does not see it, or torch is missing.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise ToolchainError("arrays on a GPU need torch; install paged-kv[torch]") from error
    try:
        return TorchArrays(Accelerator(index))
    except Exception as error:
        raise ToolchainError(f"GPU {index}: MAX finds no such device ({reason(error)})") from error


def allocate(device: ArrayDevice, name: str, shape: Shape, dtype: np.dtype[Any], kind: str) -> Any:
    """`device.new`, a fresh array of zeros.

    Raises:
        ContractError: it does not fit in memory; the message calls it `name`.
    """
    try:
        return device.new(shape, dtype, kind)
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:  # as the library says it
        raise ContractError(f"{name}: shape {list(shape)} of {dtype.name} does not fit in memory") from error


def require_host(array: Any, name: str, why: str) -> None:
    """Refuses an array on a GPU where a call has to read its values.

    Raises:
        ContractTypeError: it is on a GPU; the message says why and how to copy it.
    """
    if _gpu_index(array, name) is not None:
        raise unreadable(name, why)


def unreadable(name: str, why: str) -> ContractTypeError:
    """The error of an array on a GPU where a call has to read its values."""
    return ContractTypeError(f"{name} is on a GPU: {why} ({name}.cpu())")


def _gpu_index(array: Any, name: str) -> int | None:
    """The number of the GPU whose memory an array is in; None for the host's, and for what is no array."""
    if isinstance(array, np.ndarray):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(array.device.index or 0) if array.device.type == "cuda" else None
    device = dlpack_device(array, name)
    return None if device is None or device[0] not in _GPUS else device[1]


def _called(index: int | None) -> str:
    return "the CPU" if index is None else f"GPU {index}"
