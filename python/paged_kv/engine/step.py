"""The compiled step of a checkpoint: what it depends on, how it is built, and how it is compiled ahead of its use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer, set_virtual_cpu_target
from max.dtype import DType
from max.graph import DeviceRef, Module

from paged_kv.arguments import shown
from paged_kv.arrays.host import to_numpy
from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.config import DecoderConfig, with_cache_rotation, with_windows_apart
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.runtime.artefacts import compile_ahead
from paged_kv.runtime.compile_key import MODELS, CompileKey
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from paged_kv.runtime.graph_bundle import GraphBundle
from paged_kv.runtime.graph_reading import KernelsInLibraries, read_graph
from paged_kv.runtime.program import Program
from paged_kv.runtime.session import default_runtime

DEMO_DTYPE = DType.float32
"""In which `paged-kv demo` runs its model."""


@dataclass(frozen=True)
class StepGraph:
    """The step of all models of one geometry. Batch, lengths, page size and number of pages are run-time values."""

    geometry: DecoderConfig
    dtype: DType
    kv_format: KVFormat | None = None
    """The format of a cache of codes."""

    @staticmethod
    def of(config: DecoderConfig, dtype: DType, kv_format: KVFormat | None = None) -> StepGraph:
        """Without what of the configuration the step does not depend on."""
        geometry = replace(config, max_position_embeddings=0, bos_token_id=None, eos_token_ids=(), dtype=None)
        return StepGraph(geometry, dtype, kv_format)

    def keys(self, architecture: str) -> dict[str, CompileKey]:
        """Return what the graph depends on, by its name; `architecture` is a GPU's, as in `Runtime`."""
        facts = f"{self.dtype.name} {self.geometry}" + (f" cache of {self.kv_format}" if self.kv_format else "")
        return {decoder.STEP: CompileKey(facts, (MODELS,), architecture)}

    def build(self, module: Module, device: DeviceRef) -> None:
        """Adds the graph to `module`."""
        decoder.build_step(self.geometry, self.dtype, module, device, kv_format=self.kv_format)

    def program(self, weights: Mapping[str, Any], buffers: Sequence[np.ndarray | None]) -> Program:
        """The step as a program for this CPU.

        Args:
            weights: As for `DecoderModel`.
            buffers: For each input of the graph the array that it always is, or None for what a step brings.

        Raises:
            UnknownGraph: a program does not know one of the step's operations.
            ToolchainError: as `libraries.load`.
        """
        module = Module()
        library = KernelsInLibraries()
        decoder.build_step(self.geometry, self.dtype, module, kv_format=self.kv_format, library=library)
        graph = read_graph(module, buffers)
        return Program(graph, {name: to_numpy(weights[name]) for name in graph.weights}, buffers)


def demo_bundle() -> GraphBundle:
    """The step of `paged-kv demo`, which is compiled ahead with the kernels of the array API."""
    step = StepGraph.of(load_config(FOLDER), DEMO_DTYPE)
    return GraphBundle(step.keys(""), partial(_build_on_cpu, step), _demo_weights)


def _build_on_cpu(step: StepGraph, module: Module, _names: Sequence[str]) -> None:
    step.build(module, DeviceRef.CPU())


def _demo_weights() -> dict[str, Buffer]:
    return open_source(FOLDER).load(DEMO_DTYPE)


def compile_checkpoint(
    checkpoint: Path,
    dtype: str | None,
    target: str | None,
    out: Path | None,
    kv_format: KVFormat | None = None,
    cache_rotation: CacheRotation | None = None,
) -> Path:
    """Compiles the step of a checkpoint, or finds it compiled; returns its file.

    MAX's target is one for the process: a process that compiles for another CPU does nothing else.

    Args:
        checkpoint: A Hugging Face folder, or a GGUF file.
        dtype: "float32" or "bfloat16"; the checkpoint's own where None.
        target: The CPU to compile for, one of `REQUIRED_FLAGS`; this one where None.
        out: The folder to keep it in, the cache folder where None.
        kv_format, cache_rotation: As in `DecoderModel`.

    Raises:
        ContractError: the target is unknown, or the model cannot have that `cache_rotation`.
        CheckpointError: there is no checkpoint that this package runs.
        ToolchainError: it cannot be compiled or kept.
    """
    check_target(target)
    source = open_source(checkpoint)
    if target is not None:
        set_virtual_cpu_target(target)
    runtime = default_runtime()
    config = with_windows_apart(with_cache_rotation(source.on(runtime.device).config, cache_rotation))
    step = StepGraph.of(config, DType.bfloat16 if (dtype or config.dtype) == "bfloat16" else DType.float32, kv_format)

    def build(module: Module, _: Sequence[str]) -> None:
        step.build(module, runtime.device)

    (path,) = compile_ahead(runtime.session, step.keys(runtime.architecture), build, out)
    return path


def check_target(target: str | None) -> None:
    """Refuses a name that MAX would abort the process for.

    Raises:
        ContractError: it is none of `REQUIRED_FLAGS`.
    """
    if target is not None and target not in REQUIRED_FLAGS:
        raise ContractError(f"target must be one of {', '.join(REQUIRED_FLAGS)}, not {shown(target)}")
