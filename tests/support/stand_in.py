"""The CPU as a GPU: torch tensors on the CPU go the way of tensors on a device."""

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer

from paged_kv.arrays import devices, dlpack_transfer
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayDevice
from paged_kv.runtime import session
from support import harness


class _CpuAsGpu(TorchArrays):
    """The CPU as a GPU, whose ops run in graphs as a GPU's do."""

    index = -1


STAND_IN = _CpuAsGpu(CPU())
session._RUNTIMES[STAND_IN.index] = harness.graphs()


class OnGpu:
    """An array that says it lies on a GPU, and whose memory is never requested."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.index)

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("device memory was read")


@pytest.fixture
def stand_in(monkeypatch):
    """The CPU stands in for the GPU wherever only torch tensors come in, and DLPack refuses what some versions of torch
    refuse there: float8, and arrays without an element.
    """
    harness.runtime()  # all its graphs, in one compile
    exported, received = torch.utils.dlpack.to_dlpack, dlpack_transfer._received

    def device_of(**arrays: object) -> ArrayDevice:
        flat = [a for array in arrays.values() for a in (array if isinstance(array, tuple | list) else [array])]
        return STAND_IN if all(array is None or isinstance(array, torch.Tensor) for array in flat) else HOST

    def check(dtype: str, elements: int) -> None:
        if "float8" in dtype or not elements:
            raise BufferError(f"{elements} elements of {dtype} cannot cross")

    def to_dlpack(tensor: torch.Tensor) -> object:
        check(str(tensor.dtype), tensor.numel())
        return exported(tensor)

    def receive(buffer: Buffer) -> torch.Tensor:
        check(buffer.dtype.name, buffer.num_elements)
        return received(buffer)

    monkeypatch.setattr(devices, "device_of", device_of)
    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", to_dlpack)
    monkeypatch.setattr(dlpack_transfer, "_received", receive)


def tensors(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over the same bytes."""
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return torch.from_numpy(array.view(f"u{array.itemsize}").copy()).view(getattr(torch, name))
    return torch.from_numpy(array.copy())


def storage_of(cache) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if cache.case.rank == 5:
        return tensors(cache.k_blocks)
    return tensors(cache.k_blocks), tensors(cache.v_blocks)
