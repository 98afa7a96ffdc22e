"""The systems that `decode_gpu.py` times on a GPU, and the problem that they are all given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from max.driver import Accelerator, Buffer
from max.dtype import DType

from benchmarks import gpu_graphs
from benchmarks.gpu_timing import System
from paged_kv.arrays.devices import gpu
from paged_kv.arrays.host import HOST, to_buffer, to_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.types import ArrayDevice
from paged_kv.bench.peers.max_cpu import HOST_INPUTS, PAGE_SIZE, flash_inputs
from paged_kv.options import AttentionOptions
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant


@dataclass(frozen=True)
class Point:
    """One problem: `batch` requests of `length` tokens each."""

    batch: int
    length: int
    page_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one run reads."""
        return self.batch * self.length * self.kv_heads * self.head_dim * 2 * DType[self.kv_dtype].size_in_bytes


class Problem:
    """The arrays of a point, on "cuda" or "cpu": shuffled pages, one more page than needed, which holds NaN."""

    def __init__(self, point: Point, device: str) -> None:
        self.point, self.device = point, device
        generator = torch.Generator(device).manual_seed(0)
        per_request = -(-point.length // point.page_size)
        self.num_pages = point.batch * per_request + 1
        page = (point.page_size, point.kv_heads, point.head_dim)
        self.blocks = torch.empty(self.num_pages, 2, *page, device=device, dtype=getattr(torch, point.kv_dtype))
        for chunk in torch.split(self.blocks, 4096):  # in pieces: the float32 numbers need room too
            chunk.copy_(torch.randn(chunk.shape, device=device, generator=generator))
        order = torch.randperm(self.num_pages, device=device, generator=generator)
        self.table = order[:-1].reshape(point.batch, per_request).int().contiguous()
        self.blocks[order[-1]] = float("nan")
        q = torch.randn(point.batch, point.heads, point.head_dim, device=device, generator=generator)
        self.q = q.to(getattr(torch, point.dtype))
        self.scale = point.head_dim**-0.5

    def tokens(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one request, `[Hk, L, D]` float32."""
        pages = self.blocks[self.table[request].long()].float()
        length, dim = self.point.length, self.point.head_dim
        k, v = (pages[:, i].reshape(-1, self.point.kv_heads, dim)[:length].transpose(0, 1) for i in range(2))
        return k, v

    def expected(self, request: int) -> torch.Tensor:
        """The output of one request, `[Hq, D]` float32."""
        k, v = self.tokens(request)
        q = self.q[request].float().reshape(self.point.kv_heads, -1, self.point.head_dim)
        weights = torch.softmax(q @ k.transpose(1, 2) * self.scale, dim=-1)
        return (weights @ v).reshape(self.point.heads, -1)

    def check(self, name: str, found: torch.Tensor) -> None:
        for request in {0, self.point.batch - 1}:
            expected = self.expected(request)
            off = (found[request].float() - expected).abs().max() / expected.abs().max()
            if not off <= 2e-2:
                raise AssertionError(f"{name}: request {request} of {self.point} is off by {off:.2e}")


def copy_system(device: str) -> tuple[System, int]:
    """A copy within the device's memory, 2 GB on a GPU, and the bytes that it reads and writes."""
    size = 2 << 30 if device == "cuda" else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    return System("copy", lambda: target.copy_(source), stream, lambda o: o), 2 * size


class Source(Protocol):
    """A library: the systems of it that can do a problem, ready to run."""

    def systems(self, problem: Problem) -> Iterator[System]: ...


def max_stream() -> Any:
    """MAX's stream as torch knows it."""
    handle = Accelerator(0).default_queue.native_stream_handle
    return torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()  # type: ignore[no-untyped-call]


class Ours:
    """The op of this package: the graph that the API runs, and the kernel for any GPU."""

    def systems(self, problem: Problem) -> Iterator[System]:
        point, where = problem.point, problem.device
        on_gpu = where == "cuda"
        device: ArrayDevice = gpu(0) if on_gpu else HOST
        runtime = runtime_on(0 if on_gpu else None)
        k_blocks, v_blocks, view = Pages.of(self._of(problem.blocks), "NHD", device=device).operands()
        rows = torch.arange(point.batch, dtype=torch.int32, device=where)
        none = torch.zeros(0, device=where)
        tensors = [
            problem.q,
            rows,
            torch.full_like(rows, point.length),
            problem.table.view(torch.uint32),
            none,
            none.clone(),
        ]
        q, requests, lengths, table, *options = (device.buffer(self._of(tensor)) for tensor in tensors)
        numbers = np.array(-1, np.int32), AttentionOptions().numbers(point.head_dim)
        inputs: list[Any] = [q, requests, lengths, k_blocks, v_blocks, table, view, *options, *numbers]
        dtypes = DType[point.dtype], DType[point.kv_dtype]
        stream = max_stream() if on_gpu else None
        run = partial(runtime.execute, Variant("attention", *dtypes), *inputs)
        yield System("paged-kv", run, stream, _first)
        if on_gpu:
            torch.cuda.synchronize()
            buffers = [to_buffer(each) if isinstance(each, np.ndarray) else each for each in inputs]
            plain = gpu_graphs.attention(runtime, *dtypes, gpu_kernel="plain").load(runtime)
            yield System("paged-kv plain", partial(plain.execute, *buffers), stream, _first)

    @staticmethod
    def _of(tensor: torch.Tensor) -> Any:
        """A tensor on a GPU as it is, one of the host as an array."""
        return tensor if tensor.is_cuda else to_numpy(Buffer.from_dlpack(tensor))


def _first(outputs: Sequence[Any]) -> torch.Tensor:
    """The first result: a buffer on a GPU, or an array of the host, whose bfloat16 torch does not take from NumPy."""
    (o, *_) = outputs
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(o if isinstance(o, Buffer) else to_buffer(o))
    return found


class MaxFlashAttention:
    """MAX's own paged flash attention, over pages of 128 tokens."""

    def systems(self, problem: Problem) -> Iterator[System]:
        point = problem.point
        if point.kv_dtype != point.dtype or point.length % PAGE_SIZE:
            return
        runtime, dtype = runtime_on(0), DType[point.dtype]
        sizes = (point.heads, point.kv_heads, point.head_dim)
        model = gpu_graphs.flash_attention(runtime, dtype, *sizes).load(runtime)
        per_request = point.length // PAGE_SIZE
        table = torch.randperm(point.batch * per_request, device="cuda").reshape(point.batch, per_request)
        page = (PAGE_SIZE, point.kv_heads, point.head_dim)
        blocks = torch.empty(point.batch * per_request, 2, 1, *page, device="cuda", dtype=problem.blocks.dtype)
        for request in range(point.batch):
            for i, tokens in enumerate(problem.tokens(request)):
                blocks[table[request], i, 0] = tokens.transpose(0, 1).reshape(per_request, *page).to(blocks.dtype)
        others = flash_inputs(table.cpu().numpy(), point.length, 1, 2 * math.prod(page))
        others[-1] = np.array([point.batch, 1, self._partitions(point), point.length])
        on_device = [to_buffer(array).to(Accelerator(0)) for array in others[:-HOST_INPUTS]]
        on_host = [to_buffer(array) for array in others[-HOST_INPUTS:]]
        offsets, *lengths = on_device
        inputs: list[Any] = [gpu(0).buffer(problem.q), offsets, gpu(0).buffer(blocks), *lengths, *on_host]
        torch.cuda.synchronize()
        result = torch.utils.dlpack.from_dlpack
        yield System("MAX (pages of 128)", partial(model.execute, *inputs), max_stream(), lambda o: result(o[0]))

    @staticmethod
    def _partitions(point: Point) -> int:
        """The parts of a row of MAX's split: enough to fill the multiprocessors, each of 512 tokens or more. MAX's own
        choice is a function in Mojo, which a host without a compiler cannot call. Not yet run.
        """
        fill = torch.cuda.get_device_properties(0).multi_processor_count // (point.batch * point.kv_heads)
        return max(1, min(fill, point.length // 512, 32))


class FlashInfer:
    """FlashInfer's batch decode, on the CUDA cores and on the tensor cores."""

    def systems(self, problem: Problem) -> Iterator[System]:
        import flashinfer  # type: ignore[import-not-found]

        point = problem.point
        per_request = problem.table.shape[1]
        indptr = torch.arange(0, point.batch * per_request + 1, per_request, dtype=torch.int32, device="cuda")
        last = torch.full((point.batch,), (point.length - 1) % point.page_size + 1, dtype=torch.int32, device="cuda")
        for name, tensor_cores in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
            workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            sizes = (point.heads, point.kv_heads, point.head_dim, point.page_size)
            dtypes = {"q_data_type": problem.q.dtype, "kv_data_type": problem.blocks.dtype}
            wrapper.plan(indptr, problem.table.reshape(-1), last, *sizes, **dtypes)
            run = lambda wrapper=wrapper: wrapper.run(problem.q, problem.blocks)  # noqa: E731
            yield System(name, run, torch.cuda.current_stream(), lambda o: o)


class Torch:
    """torch's attention over contiguous K and V."""

    def systems(self, problem: Problem) -> Iterator[System]:
        point, where = problem.point, problem.device
        if point.kv_dtype != point.dtype or point.kv_bytes > 24 << 30:
            return
        shape = (point.batch, point.kv_heads, point.length, point.head_dim)
        keys, values = (torch.empty(shape, device=where, dtype=problem.q.dtype) for _ in range(2))
        for request in range(point.batch):
            keys[request], values[request] = problem.tokens(request)
        attend = torch.nn.functional.scaled_dot_product_attention
        run = lambda: attend(problem.q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]  # noqa: E731
        stream = torch.cuda.current_stream() if where == "cuda" else None
        yield System("torch, contiguous", run, stream, lambda o: o)
