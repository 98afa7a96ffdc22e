"""Graphs that the GPU benchmark runs beside the API's: each is read from disk, or compiled once and kept there.

So all of them can be compiled where there is no GPU (`gpu_bundle/graphs.py`), and run where there is no compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from max.dtype import DType
from max.engine import Model
from max.graph import Graph, Module, TensorType

from paged_kv.bench.peers import max_cpu
from paged_kv.graphs.attention import GpuKernel
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import CompileKey
from paged_kv.runtime.session import Runtime
from paged_kv.runtime.variants import Variant

_SOURCE = hashlib.sha256(b"".join(Path(name).read_bytes() for name in (__file__, max_cpu.__file__))).hexdigest()[:16]
"""The sources of these graphs, for their keys."""


@dataclass(frozen=True)
class GraphSpec:
    """A graph: its name, what it depends on, and what builds it."""

    name: str
    key: CompileKey
    build: Callable[[Module], None]

    def load(self, runtime: Runtime) -> Model:
        """The compiled graph, from disk or compiled now."""
        return load_graphs(runtime.session, {self.name: self.key}, lambda module, _: self.build(module))[self.name]


def add_one(runtime: Runtime) -> GraphSpec:
    """The least that MAX can do: float32 `[n]` plus 1."""

    def build(module: Module) -> None:
        kind = TensorType(DType.float32, ["n"], runtime.device)
        with Graph("add_one", input_types=[kind], module=module) as graph:
            graph.output(graph.inputs[0].tensor + 1)

    return GraphSpec("add_one", CompileKey(f"add_one {_SOURCE}", (), runtime.architecture), build)


def attention(
    runtime: Runtime,
    q_dtype: DType,
    kv_dtype: DType,
    *,
    batch_invariant: bool = False,
    gpu_kernel: GpuKernel = "best",
) -> GraphSpec:
    """The op of attention with options of a GPU's that the API does not have; without them it is the API's own graph.
    Inputs as `Variant.build` says.
    """
    variant = Variant("attention", q_dtype, kv_dtype)

    def build(module: Module) -> None:
        variant.build(module, runtime.device, batch_invariant=batch_invariant, gpu_kernel=gpu_kernel)

    key = variant.key(runtime.architecture)
    if batch_invariant or gpu_kernel != "best":
        options = f"{gpu_kernel}{' batch_invariant' if batch_invariant else ''} {_SOURCE}"
        key = replace(key, facts=f"{key.facts} {options}")
    return GraphSpec(variant.name, key, build)


def flash_attention(runtime: Runtime, dtype: DType, heads: int, kv_heads: int, head_dim: int) -> GraphSpec:
    """MAX's own paged flash attention: inputs as `max_cpu.flash_graph` says."""
    name = f"max_cpu_{dtype.name}_{heads}_{kv_heads}_{head_dim}"

    def build(module: Module) -> None:
        max_cpu.flash_graph(name, dtype, heads, kv_heads, head_dim, runtime.device, module)

    return GraphSpec(name, CompileKey(f"{name} {_SOURCE}", (), runtime.architecture), build)
