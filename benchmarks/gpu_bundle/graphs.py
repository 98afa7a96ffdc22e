"""Compiles the graphs that a host will run, for a device that need not be here, into a cache folder.

    XDG_CACHE_HOME=FOLDER python -m paged_kv.benchmarks.gpu_bundle.graphs gpu|cpu [NAME...]

A process for each kind of device: MAX takes virtual devices only before its first use. The names of the files are
those that the host will look for: the same sources, the same versions, the CPU target and the GPU's architecture of
`steps.py`. Prints a line for each graph; what is there already is not compiled again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from max import driver
from max.dtype import DType

from paged_kv.benchmarks import gpu_graphs
from paged_kv.benchmarks.gpu_bundle.steps import ARCHITECTURE, CPU_TARGET
from paged_kv.benchmarks.gpu_graphs import GraphSpec
from paged_kv.runtime import variants
from paged_kv.runtime.artefact_folder import user_artefacts
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.compile_key import CompileKey, Sources, toolchain
from paged_kv.runtime.session import runtime_on
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
    keys: Mapping[str, CompileKey]
    compile: Callable[[], object]


def wanted(device: str) -> list[Wanted]:
    """What the steps of a device run, the most needed first."""
    runtime = runtime_on(0 if device == "gpu" else None)
    f32, f16, bf16, f8 = DType.float32, DType.float16, DType.bfloat16, DType.float8_e4m3fn

    def api(op: Op, q: DType, kv: DType) -> Wanted:
        variant = Variant(op, q, kv)
        key = CompileKey(variant.name, variants.__name__, (variants.REGISTERED[op],), runtime.architecture)
        return Wanted(variant.name, {variant.name: key}, lambda: runtime.load([variant]))

    def graph(name: str, spec: GraphSpec) -> Wanted:
        return Wanted(name, {spec.name: spec.key}, lambda: spec.load(runtime))

    words = DType.uint32
    first = [graph("add_one", gpu_graphs.add_one(runtime)), api("attention", bf16, bf16)]
    copies = [api("append", words, words), api("gather", words, words)]
    if device == "cpu":  # the API tests compare with float32 on the CPU
        return [*first, api("attention", f32, f32), api("attention", bf16, f8), *copies]
    plain = [
        graph(f"plain_{kv.name}", gpu_graphs.attention(runtime, bf16, kv, gpu_kernel="plain")) for kv in (bf16, f8)
    ]
    flash = [
        graph(f"max_flash_{heads}", gpu_graphs.flash_attention(runtime, bf16, heads, 8, 128)) for heads in (32, 64)
    ]
    return [
        *first,
        api("attention", bf16, f8),
        plain[0],
        flash[0],
        *copies,
        api("attention", f16, f16),
        *plain[1:],
        *flash[1:],
    ]


def digests_of(graphs: Wanted) -> set[str]:
    """The names of their files."""
    sources, tools = Sources.installed(), toolchain()
    return {key.digest(sources, tools) for key in graphs.keys.values()}


def is_kept(graphs: Wanted) -> bool:
    """Whether the cache folder has them."""
    digests = digests_of(graphs)
    return digests == {digest for artefact in user_artefacts().find(digests) for digest in artefact.digests}


def main(arguments: Sequence[str]) -> None:
    device, *names = arguments
    use_host_target(device, virtual=True)
    every = wanted(device)
    listed = sorted(digest for graphs in every for digest in digests_of(graphs))
    (cache_folder() / f"{device}.txt").write_text("\n".join(listed) + "\n")  # all else in the folder is older
    for graphs in every:
        if (names and graphs.name not in names) or is_kept(graphs):
            continue
        started = time.monotonic()
        graphs.compile()
        print(f"{device} {graphs.name}: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # MAX ends badly where it has virtual devices
