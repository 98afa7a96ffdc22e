"""Where a call runs: the CPU or one GPU, and how MAX's stream there and torch's follow each other.

Nothing here reads device memory, and no call waits for the device: MAX's stream is made to wait for torch's current
one, and that for MAX's when the call was enqueued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device

from paged_kv.errors import ContractError, ContractTypeError, ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paged_kv.runtime.session import Runtime

_GPUS = (2, 10)  # DLPack's kDLCUDA and kDLROCM


def device_index(array: Any) -> int | None:
    """The number of the GPU whose memory an array is in; None for the CPU's, and for what is no array."""
    if isinstance(array, np.ndarray):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(array.device.index or 0) if array.device.type == "cuda" else None
    found = getattr(array, "__dlpack_device__", None)
    if found is None:
        return None
    kind, index = found()
    return int(index) if int(kind) in _GPUS else None


def place_of(**arrays: Any) -> Place | None:
    """The GPU that all of some arrays are on, those that are None left out; None where they are on the CPU.

    An argument that is a tuple or list stands for its entries.

    Raises:
        ContractTypeError: they are on different devices.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    flat = {}
    for name, array in arrays.items():
        if isinstance(array, tuple | list):
            flat.update({f"{name}[{i}]": entry for i, entry in enumerate(array)})
        elif array is not None:
            flat[name] = array
    found = {name: device_index(array) for name, array in flat.items()}
    (first, index), *others = found.items()
    for name, other in others:
        if other != index:
            raise ContractTypeError(f"{name} is on {_called(other)}, {first} is on {_called(index)}")
    return None if index is None else gpu(index)


def _called(index: int | None) -> str:
    return "the CPU" if index is None else f"GPU {index}"


@cache
def gpu(index: int) -> Place:
    """One GPU of this process.

    Raises:
        ToolchainError: MAX does not see it, or torch is missing.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise ToolchainError("arrays on a GPU need torch; install paged-kv[torch]") from error
    try:
        device = Accelerator(index)
    except (RuntimeError, ValueError) as error:
        raise ToolchainError(f"GPU {index}: MAX finds no such device ({' '.join(str(error).split())})") from error
    return Place(device)


def place_named(device: Any) -> Place | None:
    """The GPU that torch calls so ("cuda", "cuda:1", a `torch.device`); None for the CPU.

    Raises:
        ContractError: it is neither.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ContractError(f"device must be the CPU or a GPU ('cuda', 'cuda:1'), not {device!r}")
    return gpu(int(index or 0))


@dataclass(frozen=True)
class Place:
    """A device that calls run on: MAX's device and its stream."""

    device: Device

    @property
    def runtime(self) -> Runtime:
        """The compiled variants on this device."""
        from paged_kv.runtime.session import runtime_on

        return runtime_on(None if self.device.is_host else self.device.id)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Work that is enqueued inside follows what torch's current stream holds, and precedes what comes after."""
        if self.device.is_host:
            yield
            return
        with self._streams() as (ours, theirs):
            ours.wait_stream(theirs)
            try:
                yield
            finally:
                theirs.wait_stream(ours)

    def after_torch(self) -> None:
        """MAX's stream waits for torch's current one: for buffers that torch has just written."""
        if not self.device.is_host:
            with self._streams() as (ours, theirs):
                ours.wait_stream(theirs)

    def before_torch(self) -> None:
        """The other way round: for buffers that torch is about to read."""
        if not self.device.is_host:
            with self._streams() as (ours, theirs):
                theirs.wait_stream(ours)

    @contextmanager
    def _streams(self) -> Iterator[tuple[Any, Any]]:
        """MAX's stream and torch's current one, on this device."""
        torch = sys.modules["torch"]
        with torch.cuda.device(self.device.id):
            # MAX's stream may be the legacy default one, which has no handle.
            handle = self.device.default_queue.native_stream_handle
            ours = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
            yield ours, torch.cuda.current_stream()

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """A fresh torch tensor in this device's memory."""
        torch = import_module("torch")
        at = "cpu" if self.device.is_host else f"cuda:{self.device.id}"
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype.name), device=at)

    def upload(self, buffer: Buffer) -> Buffer:
        """A host buffer's contents in this device's memory; the host buffer has to live until it is used there."""
        return buffer if self.device.is_host else buffer.to(self.device)


HOST = Place(CPU())
"""The CPU as a place: what runs on a GPU can be tried on it."""
