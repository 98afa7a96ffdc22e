"""The first GPU as a place where the ops of `harness.py` run."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import Model

from benchmarks import gpu_graphs
from gpu.rules import attention_kernel, block_threads
from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.graphs import ops
from paged_kv.reference import cache_views
from paged_kv.runtime.kernel_launches import ATTENTION, Launch, launched
from paged_kv.runtime.session import Runtime, runtime_on
from paged_kv.runtime.variants import Variant
from support.harness import Storage


@cache
def runtime() -> Runtime:
    return runtime_on(0)


@cache
def device() -> Accelerator:
    return Accelerator(0)


def upload(array: np.ndarray) -> Buffer:
    return to_buffer(np.ascontiguousarray(array)).to(device())


def download(buffer: Buffer) -> np.ndarray:
    return to_numpy(buffer.to(runtime().session.devices[0])).copy()


class Copy:
    """A cache's arrays on the GPU, as the strided operands that every op takes."""

    def __init__(self, k_blocks: np.ndarray, v_blocks: np.ndarray, layout: str, layer: int, bits: bool) -> None:
        self._arrays = [k_blocks] if k_blocks is v_blocks else [k_blocks, v_blocks]
        kind = np.dtype(f"u{k_blocks.itemsize}") if bits else k_blocks.dtype
        self._buffers = [upload(array.reshape(-1).view(kind)) for array in self._arrays]
        numbers: list[int] = []
        views = cache_views(k_blocks, v_blocks, layout, layer)
        for view, array in zip(views, (k_blocks, v_blocks), strict=True):
            start = (view.ctypes.data - array.ctypes.data) // array.itemsize if view.size else 0
            strides = [stride // array.itemsize for stride in view.strides[:3]]
            numbers += [start, *strides]
        self.view = to_buffer(np.array([*views[0].shape, *numbers, views[1].shape[3]], np.int64))

    @property
    def blocks(self) -> tuple[Buffer, Buffer]:
        first, last = self._buffers[0], self._buffers[-1]
        return first, last.view(last.dtype, last.shape)

    def write_back(self) -> None:
        """Copies the GPU's bytes into the arrays they came from."""
        for array, buffer in zip(self._arrays, self._buffers, strict=True):
            array[...] = download(buffer).view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Gpu:
    """The GPU: arrays are copied there and back. Each call asserts which kernel ran."""

    batch_invariant: bool = False
    gpu_kernel: ops.GpuKernel = "best"

    def execute(
        self,
        variant: Variant,
        rows: list[np.ndarray],
        storage: Storage,
        lookup_table: np.ndarray,
        tensors: tuple[np.ndarray, ...] = (),
        numbers: tuple[np.ndarray | np.generic, ...] = (),
    ) -> tuple[np.ndarray, ...]:
        """As `harness.Place` says."""
        moves = variant.op in ("append", "gather")
        # Append and gather that do not quantise only move bits.
        copy = Copy(*storage, bits=moves and variant.dtype == variant.kv_dtype)
        operands = (*map(upload, rows), *copy.blocks, upload(lookup_table), copy.view, *map(upload, tensors))
        scalars = [to_buffer(np.array(number)) for number in numbers]
        with launched() as launches:
            if variant.op == "attention":
                dtypes = variant.dtype.name, variant.kv_dtype.name
                model = attention_model(*dtypes, self.batch_invariant, self.gpu_kernel)
                results = model.execute(*operands, *scalars)
            else:
                results = runtime().execute(variant, *operands, *scalars)
        if variant.op == "append":
            copy.write_back()
        if not moves and (kernel := self._kernel(variant, rows, storage)):
            check_launches(launches, kernel, storage[0].dtype.name)
        return tuple(map(download, results))

    def _kernel(self, variant: Variant, rows: list[np.ndarray], storage: Storage) -> str | None:
        """The kernel that has to serve a call of attention; None where nothing is launched."""
        if variant.op == "mla_attention":
            return "gpu/latent"
        if variant.op == "masked_attention":
            return "gpu/generic"
        q, (keys, _) = rows[0], cache_views(*storage)
        if not q.size:
            return None
        if not len(keys):
            return "gpu/generic"
        page_size, kv_heads, head_dim = keys.shape[1:]
        sizes = (head_dim, q.shape[1] // kv_heads, page_size)
        return attention_kernel(device().architecture_name, q.dtype.name, keys.dtype.name, *sizes, self.gpu_kernel)


def check_launches(launches: list[Launch], kernel: str, kv_dtype: str) -> None:
    """Asserts that the attention kernel among these, one a pass, is as expected, on one stream with the others."""
    found = {(launch.kernel, launch.block) for launch in launches if launch.kernel in ATTENTION}
    assert found == {(kernel, (block_threads(kernel, float8=kv_dtype.startswith("float8")), 1, 1))}, launches
    assert len({launch.stream for launch in launches}) == 1, launches


@cache
def attention_model(q_dtype: str, kv_dtype: str, batch_invariant: bool, gpu_kernel: ops.GpuKernel) -> Model:
    """The graph of one variant; its inputs are those of `Variant.build`."""
    options = {"batch_invariant": batch_invariant, "gpu_kernel": gpu_kernel}
    return gpu_graphs.attention(runtime(), DType[q_dtype], DType[kv_dtype], **options).load(runtime())
