"""Compiles the graphs that a host will run, for a device that need not be here, into a cache folder.

    XDG_CACHE_HOME=FOLDER python -m benchmarks.gpu_bundle.graphs gpu|cpu [NAME...]

A process for each kind of device: MAX takes virtual devices only before its first use. The names of the files are
those that the host will look for: the same sources, the same versions, the CPU target and the GPU's architecture of
`steps.py`. Prints a line for each graph; what is there already is not compiled again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from max import driver
from max.dtype import DType
from max.graph import Module

from benchmarks import gpu_graphs
from benchmarks.gpu_bundle import families, models
from benchmarks.gpu_bundle.steps import ARCHITECTURE, CPU_TARGET
from benchmarks.gpu_graphs import GraphSpec
from paged_kv.engine.step import StepGraph
from paged_kv.graphs.attention import GpuKernel
from paged_kv.runtime import compile_key, libraries
from paged_kv.runtime.artefacts import compile_ahead
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.compile_key import CompileKey, Key, Sources
from paged_kv.runtime.libraries import Kernel
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.store import Store, user_store
from paged_kv.runtime.variants import Op, Variant


def use_host_target(device: str, *, virtual: bool) -> None:
    """Sets what the host has, before MAX is used: its CPU target and, for a GPU that is not here, a virtual one."""
    driver.set_virtual_cpu_target(CPU_TARGET)
    if virtual and device == "gpu":
        driver.set_virtual_device_api("cuda")
        driver.set_virtual_device_target_arch(ARCHITECTURE)
        driver.set_virtual_device_count(1)


@dataclass(frozen=True)
class Wanted:
    """Graphs that are compiled together: what each depends on, by its name, and what compiles and keeps them."""

    name: str
    keys: Mapping[str, Key]
    compile: Callable[[], object]
    store: Callable[[], Store] = user_store
    """The store that keeps the files."""


def wanted(device: str) -> list[Wanted]:
    """Return what the steps of a device run, the most needed first."""
    runtime = runtime_on(0 if device == "gpu" else None)
    f32, f16, bf16, f8 = DType.float32, DType.float16, DType.bfloat16, DType.float8_e4m3fn

    def api(op: Op, q: DType, kv: DType, o: DType | None = None) -> Wanted:
        variant = Variant(op, q, kv, o)
        key = variant.key(runtime.architecture)
        return Wanted(variant.name, {variant.name: key}, lambda: runtime.load([variant]))

    def graph(name: str, spec: GraphSpec) -> Wanted:
        return Wanted(name, {spec.name: spec.key}, lambda: spec.load(runtime))

    def built(name: str, keys: dict[str, CompileKey], build: Callable[[Module, Sequence[str]], None]) -> Wanted:
        return Wanted(name, keys, lambda: compile_ahead(runtime.session, keys, build))

    def step(name: str, step: StepGraph) -> Wanted:
        return built(name, step.keys(runtime.architecture), lambda module, _: step.build(module, runtime.device))

    if device == "cpu":  # the API tests compare with float32 on the CPU
        kernels = [Kernel("attention", (q.name, kv.name, q.name)) for q, kv in ((bf16, bf16), (f32, f32), (bf16, f8))]
        kernels.append(Kernel("merge", ("float32",)))
        return [graph("add_one", gpu_graphs.add_one(runtime)), *map(_library, kernels)]
    words = DType.uint32
    first = [graph("add_one", gpu_graphs.add_one(runtime)), api("attention", bf16, bf16)]
    copies = [api("append", words, words), api("gather", words, words)]
    plain = [
        graph(f"plain_{kv.name}", gpu_graphs.attention(runtime, bf16, kv, gpu_kernel="plain")) for kv in (bf16, f8)
    ]
    flash = [
        graph(f"max_flash_{heads}", gpu_graphs.flash_attention(runtime, bf16, heads, 8, 128)) for heads in (32, 64)
    ]
    moves: tuple[Op, ...] = ("append", "gather")
    chosen: tuple[GpuKernel, ...] = ("best", "plain")
    return [
        *first,
        api("attention", bf16, f8),
        plain[0],
        flash[0],
        *copies,
        api("attention", f16, f16),
        *plain[1:],
        *flash[1:],
        step("step_demo", models.demo_step()),
        step("step_llama", models.llama_step()),
        *(api(op, bits, bits) for bits in (DType.uint8, DType.uint16) for op in moves),
        api("mla_attention", bf16, bf16),
        api("merge", bf16, bf16),
        api("masked_attention", bf16, bf16, f32),
        api("attention", f32, f32),
        graph("plain_float16", gpu_graphs.attention(runtime, f16, f16, gpu_kernel="plain")),
        graph("plain_float32", gpu_graphs.attention(runtime, f32, f32, gpu_kernel="plain")),
        *(
            graph(
                f"invariant_{kernel}_{dtype.name}",
                gpu_graphs.attention(runtime, dtype, dtype, batch_invariant=True, gpu_kernel=kernel),
            )
            for dtype in (bf16, f16, f32)
            for kernel in chosen
        ),
        api("attention", bf16, DType.uint8),
        api("append", bf16, DType.uint8),
        api("attention", bf16, DType.int8),
        api("append", bf16, DType.int8),
        api("attention", bf16, DType.float8_e5m2),
        graph("plain_float8_e5m2", gpu_graphs.attention(runtime, bf16, DType.float8_e5m2, gpu_kernel="plain")),
        *(step(f"step_{name}", graphs) for name, graphs in families.step_graphs().items()),
    ]


def _library(kernel: Kernel) -> Wanted:
    """The library of a CPU's kernel, with those of the copies of its pages."""
    file = kernel.library.file
    return Wanted(file, {file: kernel.library.key()}, partial(libraries.load, [kernel]), libraries.user_libraries)


def digests_of(graphs: Wanted) -> dict[str, str]:
    """The names of their files, by the names of the graphs."""
    return compile_key.digests_of(graphs.keys, Sources.installed())


def is_kept(graphs: Wanted) -> bool:
    """Return whether the cache folder has them."""
    digests = set(digests_of(graphs).values())
    return digests == {digest for artefact in graphs.store().find(digests) for digest in artefact.digests}


def compile_missing(device: str, names: Sequence[str]) -> None:
    """Compiles what the cache folder lacks, of some names or of all; and writes down which file is which graph."""
    every = wanted(device)
    listed = {graphs.name: digests_of(graphs) for graphs in every}
    _list_of(device).write_text(json.dumps(listed, indent=1))
    for graphs in every:
        if (names and graphs.name not in names) or is_kept(graphs):
            continue
        started = time.monotonic()
        graphs.compile()
        print(f"{device} {graphs.name}: {time.monotonic() - started:.1f} s", flush=True)


def adopt(device: str) -> str:
    """On a host that looks for other names than were packed, gives the files those names: its MAX may call the
    architecture something else. What became of it, in words.
    """
    listed = json.loads(_list_of(device).read_text())
    missing, renamed = [], 0
    for graphs in wanted(device):
        folder = graphs.store()
        for name, digest in digests_of(graphs).items():
            if folder.find([digest]):
                continue
            found = folder.find([listed.get(graphs.name, {}).get(name, digest)])
            if found:
                folder.keep([digest], partial(_write, found[0].content))
                renamed += 1
            else:
                missing.append(graphs.name)
    if missing:
        return f"{renamed} graphs renamed; not in the bundle: {', '.join(missing)}"
    return f"{renamed} graphs renamed" if renamed else "every graph has the name that this host looks for"


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _list_of(device: str) -> Path:
    return cache_folder() / f"{device}.json"


def main(arguments: Sequence[str]) -> None:
    device, *names = arguments
    use_host_target(device, virtual=True)
    compile_missing(device, names)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # MAX ends badly where it has virtual devices
