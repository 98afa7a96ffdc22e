"""Checks that the host runs, one a process: `python -m benchmarks.gpu_bundle.checks --device gpu|cpu NAME`.

    names       whether the host looks for the compiled graphs under the names that they have
    hello       x + 1 by MAX
    attention   decode attention of the API against float64: lengths at the edges of pages and tiles, unused slots NaN
    float8      the same over a float8 cache
    empty       a batch without requests, and a request without tokens
    memory      what MAX holds of the GPU's memory once it has a context
    launches    the kernels that one call gives the GPU, by MAX's list of launches
    trace       the kernels that ran: their time, registers, blocks an SM, stream, as CUPTI saw them
    assembler   the registers of every kernel in the artefacts; none may spill
    host        what a call costs the host: runs enqueued one after the other, without a wait
    latent      MLA decode at DeepSeek's sizes: against float64, and the time of the device
    demo        `paged-kv demo` on the device: shared prefixes, samples, preemption, and a recompute in NumPy
    pages       the demo's model in an engine: forks, the disk tier, lookup
    families    small models of five kinds against transformers, and caches of codes against the CPU
    llama       steps of a Llama of 1.1 G parameters: logits of a prompt against float64, milliseconds a step

Each prints facts as JSON objects, one a line, and what it found as its last line; the exit status is 1 where it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.gpu_bundle.families import families
from benchmarks.gpu_bundle.graphs import adopt, use_host_target
from benchmarks.gpu_bundle.models import demo, llama, pages
from benchmarks.gpu_bundle.run import emit
from paged_kv.runtime.cache_folder import cache_path

LENGTHS = (700, 1, 33, 64, 65, 127, 16)
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


def names(device: str) -> str:
    return adopt(device)


def hello(device: str) -> str:
    from max.driver import CPU, Buffer

    from benchmarks.gpu_graphs import add_one
    from paged_kv.runtime.session import runtime_on

    runtime = runtime_on(0 if device == "gpu" else None)
    emit(check="hello", architecture=runtime.architecture or "cpu")
    x = Buffer.from_numpy(np.arange(5, dtype=np.float32)).to(runtime.driver_device)
    found = add_one(runtime).load(runtime).execute(x)[0].to(CPU()).to_numpy().tolist()
    if found != [1, 2, 3, 4, 5]:
        raise AssertionError(f"x + 1 is {found}")
    return "MAX adds"


def attention(device: str) -> str:
    return _decode(device, "bfloat16", 1e-2)


def float8(device: str) -> str:
    return _decode(device, "float8_e4m3fn", 2e-2)


def _decode(device: str, kv_dtype: str, tolerance: float) -> str:
    wrapper, q, cache, expected = problem(device, kv_dtype)
    o, lse = wrapper.run(q, cache, return_lse=True)
    for name, found, reference in (("o", o, expected[0]), ("lse", lse, expected[1])):
        numbers = found.float().cpu().numpy().astype(np.float64)
        off = float(np.abs(numbers - reference).max() / np.abs(reference).max())
        emit(check=f"attention over {kv_dtype}", output=name, off=off, tolerance=tolerance)
        if not off <= tolerance:  # NaN too
            raise AssertionError(f"{name} is off by {off:.1e}, more than {tolerance}")
    return f"attention over {kv_dtype} is right"


def problem(device: str, kv_dtype: str) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """A planned wrapper, its queries and cache on the device, and o and lse in float64."""
    import torch

    from paged_kv import reference
    from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper

    where = "cuda" if device == "gpu" else "cpu"
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(pages) + 1, generator=generator).numpy()
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    blocks = torch.full((sum(pages) + 1, 2, PAGE, KV_HEADS, DIM), float("nan"))
    table = np.zeros((len(LENGTHS), max(pages)), np.uint32)
    for i, length in enumerate(LENGTHS):
        table[i, : pages[i]] = order[indptr[i] : indptr[i + 1]]
        tokens = torch.randn(2, pages[i] * PAGE, KV_HEADS, DIM, generator=generator)
        tokens[:, length:] = float("nan")
        blocks[table[i, : pages[i]].astype(np.int64)] = tokens.reshape(2, pages[i], PAGE, KV_HEADS, DIM).swapaxes(0, 1)
    # [pages, 2, page_size, Hk, D]
    blocks = blocks.to(getattr(torch, kv_dtype))
    q = torch.randn(len(LENGTHS), HEADS, DIM, generator=generator).bfloat16()
    wide = blocks.float().numpy().astype(np.float64)
    rows = (np.arange(len(LENGTHS), dtype=np.int32), np.array(LENGTHS, np.int32))
    expected = reference.attention(q.float().numpy(), wide[:, 0], wide[:, 1], table, *rows)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    last = np.array([(length - 1) % PAGE + 1 for length in LENGTHS], np.int32)
    sizes = (HEADS, KV_HEADS, DIM, PAGE)
    indices = order[: indptr[-1]].astype(np.int32)
    wrapper.plan(indptr, indices, last, *sizes, q_data_type="bfloat16", kv_data_type=kv_dtype)
    return wrapper, q.to(where), blocks.to(where), expected


def empty(device: str) -> str:
    import torch

    from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper

    where = "cuda" if device == "gpu" else "cpu"
    blocks = torch.full((3, 2, PAGE, KV_HEADS, DIM), float("nan"), dtype=torch.bfloat16, device=where)
    for batch in (0, 2):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        nothing = np.zeros(0, np.int32)
        indptr, last = np.zeros(batch + 1, np.int32), np.zeros(batch, np.int32)
        wrapper.plan(indptr, nothing, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type="bfloat16")
        q = torch.ones(batch, HEADS, DIM, dtype=torch.bfloat16, device=where)
        o, lse = wrapper.run(q, blocks, return_lse=True)
        if o.shape != q.shape or o.any() or not torch.isneginf(lse).all():
            raise AssertionError(f"{batch} empty requests: o is not 0 or lse not -inf")
    return "empty batches and requests give zeros"


def memory(_: str) -> str:
    import torch

    from paged_kv.runtime.session import runtime_on

    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    runtime_on(0)
    after = torch.cuda.mem_get_info()[0]
    percent = os.environ.get("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT")
    emit(check="memory", percent=percent, total=total, before_max=total - free, held_by_max=free - after)
    return f"MAX's context holds {(free - after) / 2**30:.1f} of {total / 2**30:.0f} GiB"


def launches(_: str) -> str:
    from paged_kv.runtime.kernel_launches import launched

    wrapper, q, cache = problem("gpu", "bfloat16")[:3]
    wrapper.run(q, cache)  # loads and places everything
    with launched() as found:
        wrapper.run(q, cache)
    for launch in found:
        emit(check="launch", **asdict(launch))
    kernels = [launch.kernel for launch in found]
    if "gpu/hopper" not in kernels:
        raise AssertionError(f"the Hopper kernel was not launched: {kernels}")
    return f"launched: {', '.join(kernels)}"


def trace(_: str) -> str:
    import torch
    from torch.profiler import ProfilerActivity, profile

    wrapper, q, cache = problem("gpu", "bfloat16")[:3]
    wrapper.run(q, cache)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        wrapper.run(q, cache)
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        written = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(written))
        events = json.loads(written.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        facts = event["args"]
        kept = ("grid", "block", "registers per thread", "shared memory", "stream", "blocks per SM")
        emit(check="kernel", kernel=event["name"], us=event["dur"], **{name: facts.get(name) for name in kept})
    names = [event["name"] for event in kernels]
    if not any("attention_gpu_hopper" in name for name in names):
        raise AssertionError(f"the Hopper kernel did not run: {names}")
    return f"{len(kernels)} kernels, the Hopper kernel among them"


def host(_: str) -> str:
    import torch

    wrapper, q, cache = problem("gpu", "bfloat16")[:3]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    written: dict[str, Any] = {"out": out, "lse": lse, "return_lse": True}
    given: tuple[tuple[str, dict[str, Any]], ...] = (("new results", {}), ("out and lse given", written))
    for name, options in given:
        for count in (20, 300):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _run in range(count):
                wrapper.run(q, cache, **options)
            enqueued = time.perf_counter() - started
            torch.cuda.synchronize()
            whole = time.perf_counter() - started
        emit(check="host", run=name, enqueue_us=1e6 * enqueued / count, whole_us=1e6 * whole / count)
    return f"{1e6 * whole / count:.0f} us a call, {1e6 * enqueued / count:.0f} of the host"


def latent(device: str) -> str:
    import torch

    from benchmarks.gpu_timing import System, clock_of, medians_ms
    from paged_kv import reference
    from paged_kv.mla import BatchMLAPagedAttentionWrapper

    where = "cuda" if device == "gpu" else "cpu"
    heads, page = 128, 64
    scale = 192**-0.5
    for batch, length in ((3, 333), (64, 4096)):
        pages = -(-length // page)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(batch * pages, generator=generator).int()
        ckv, kpe = (torch.randn(batch * pages, page, dim, generator=generator).bfloat16() for dim in (512, 64))
        q_nope, q_pe = (torch.randn(batch, heads, dim, generator=generator).bfloat16() for dim in (512, 64))
        wrapper = BatchMLAPagedAttentionWrapper(None)
        lengths = np.full(batch, length, np.int32)
        offsets, indptr = np.arange(batch + 1, dtype=np.int32), np.arange(batch + 1, dtype=np.int32) * pages
        sizes = (heads, 512, 64, page, False, scale)
        wrapper.plan(offsets, indptr, order.numpy(), lengths, *sizes, "bfloat16", "bfloat16")
        arrays: list[Any] = [array.to(where) for array in (q_nope, q_pe, ckv, kpe)]
        if batch == 3:
            o = wrapper.run(*arrays).float().cpu().numpy()
            operands: list[Any] = [array.float().numpy() for array in (q_nope, q_pe, ckv, kpe)]
            operands += [
                order.numpy().astype(np.uint32).reshape(batch, pages),
                np.arange(batch, dtype=np.int32),
                lengths,
            ]
            expected = partial(reference.mla_attention, *operands)(sm_scale=scale)[0]
            off = float(np.abs(o - expected).max() / np.abs(expected).max())
            emit(check="latent", off=off)
            if not off <= 1e-2:
                raise AssertionError(f"latent attention is off by {off:.1e}")
        elif where == "cuda":
            run = partial(wrapper.run, *arrays)
            system = System("latent", run, torch.cuda.current_stream(), lambda o: o)
            (median,) = medians_ms([system], 10, clock_of(where))
            if isinstance(median, Exception):
                raise median
            size = batch * length * 576 * 2
            emit(check="latent", batch=batch, length=length, ms=median, gb_s=size / median / 1e6)
    return "latent attention is right"


def assembler(_: str) -> str:
    cubins = import_module("gpu.model.cubins")  # of tests/
    folder = cache_path() / "compiled"
    kernels: dict[str, Any] = {}
    for path in sorted(folder.glob("*.graph")):
        kernels |= {kernel.name: kernel for kernel in cubins.kernels(path.read_bytes())}
    for kernel in kernels.values():
        emit(check="kernel", kernel=kernel.name, registers=kernel.registers, stack_bytes=kernel.stack_bytes)
    spilled = [kernel.name for kernel in kernels.values() if kernel.stack_bytes]
    if spilled or not kernels:
        raise AssertionError(f"{len(kernels)} kernels in {folder}, of which these have a stack: {spilled}")
    return f"{len(kernels)} kernels, none has a stack"


CHECKS: dict[str, Callable[[str], str]] = {
    check.__name__: check
    for check in (
        *(names, hello, attention, float8, empty, memory, launches, trace, assembler),
        *(host, latent, demo, pages, families, llama),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments = parser.parse_args()
    use_host_target(arguments.device, virtual=False)
    try:
        print(CHECKS[arguments.check](arguments.device))
    except Exception as error:  # anything may fail on a host that nothing has run on
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
