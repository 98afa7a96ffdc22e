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
from max.graph import DeviceRef, Graph, Module, TensorType

from paged_kv.errors import ToolchainError
from paged_kv.graphs.attention import GpuKernel
from paged_kv.runtime import variants
from paged_kv.runtime.api_variants import variant_key
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import CompileKey
from paged_kv.runtime.session import Runtime
from paged_kv.runtime.variants import Variant

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
"""What builds these graphs, for their keys."""

FLASH_PAGE = 128
"""Tokens in a page of MAX's own attention, which takes no smaller ones."""

FLASH_HOST_INPUTS = 4


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

    return GraphSpec("add_one", CompileKey(f"add_one {_SOURCE}", variants.__name__, (), runtime.architecture), build)


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

    key = variant_key(variant, runtime.architecture)
    if batch_invariant or gpu_kernel != "best":
        options = f"{gpu_kernel}{' batch_invariant' if batch_invariant else ''} {_SOURCE}"
        key = replace(key, facts=f"{key.facts} {options}")
    return GraphSpec(variant.name, key, build)


def flash_attention(runtime: Runtime, dtype: DType, heads: int, kv_heads: int, head_dim: int) -> GraphSpec:
    """MAX's own paged flash attention, causal: q, the rows' offsets, and the cache as MAX has it, of which
    `FLASH_HOST_INPUTS`, the last ones, lie on the host.
    """
    name = f"max_flash_{dtype.name}_{heads}_{kv_heads}_{head_dim}"

    def build(module: Module) -> None:
        from max.graph import ops
        from max.nn.attention.mask_config import MHAMaskVariant
        from max.nn.kernels import flash_attention_ragged
        from max.nn.kv_cache import MHAKVCacheParams  # compiled by MAX where it is first imported: not on the host

        device = runtime.device
        params = MHAKVCacheParams(
            dtype=dtype, head_dim=head_dim, num_layers=1, devices=[device], page_size=FLASH_PAGE, n_kv_heads=kv_heads
        )
        q = TensorType(dtype, ["n", heads, head_dim], device)
        types = [q, TensorType(DType.uint32, ["offsets"], device), *params.flattened_kv_inputs()]
        on_host = [kind.device.is_cpu() for kind in types]
        if on_host != [False] * (len(types) - FLASH_HOST_INPUTS) + [True] * FLASH_HOST_INPUTS:
            raise ToolchainError(f"this MAX has other inputs of paged attention: {types}")
        with Graph(name, input_types=types, module=module) as graph:
            q_value, offsets, *kv = graph.inputs
            cache = params.unflatten_kv_inputs(iter(kv))[0]
            layer = ops.constant(0, DType.uint32, DeviceRef.CPU())
            arguments = (params, q_value.tensor, offsets.tensor, cache, layer, MHAMaskVariant.CAUSAL_MASK)
            graph.output(flash_attention_ragged(*arguments, scale=head_dim**-0.5))

    return GraphSpec(name, CompileKey(f"{name} {_SOURCE}", variants.__name__, (), runtime.architecture), build)
