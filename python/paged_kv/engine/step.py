"""The compiled step of a checkpoint: what it depends on, how it is built, and how it is compiled ahead of its use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, KernelLibrary, Module

from paged_kv.arrays.dtypes import numpy_dtype
from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.adapters import AdapterStacks
from paged_kv.graphs.models.config import DecoderConfig, with_cache_rotation, with_separate_windows
from paged_kv.graphs.ops import cache_dtype
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.runtime.artefacts import compile_ahead
from paged_kv.runtime.compile_key import MODELS, CompileKey
from paged_kv.runtime.graph_reading import KernelsInLibraries, ReadGraph, UnknownGraph, graph_building, read_graph
from paged_kv.runtime.libraries import Kernel, Library, load
from paged_kv.runtime.program import Program, graph_kernels
from paged_kv.runtime.session import default_runtime

logger = logging.getLogger("paged_kv.engine")
DEMO_DTYPE = DType.float32
"""In which `paged-kv demo` runs its model."""


@dataclass(frozen=True)
class StepGraph:
    """The step of all models of one geometry. Batch, lengths, page size and number of pages are run-time values."""

    geometry: DecoderConfig
    dtype: DType
    kv_format: KVFormat | None = None
    """The format of a cache of codes."""
    draft: DecoderConfig | None = None
    """The draft layer that takes its hidden states."""
    output: decoder.Output = "logits"
    adapters: AdapterStacks | None = None
    """The sizes of the adapters of its rows."""

    @staticmethod
    def of(
        config: DecoderConfig,
        dtype: DType,
        kv_format: KVFormat | None = None,
        *,
        draft: DecoderConfig | None = None,
        output: decoder.Output = "logits",
    ) -> StepGraph:
        """Without what of the configuration the step does not depend on."""
        geometry = replace(config, max_position_embeddings=0, bos_token_id=None, eos_token_ids=(), dtype=None)
        return StepGraph(geometry, dtype, kv_format, draft, output)

    def keys(self, architecture: str) -> dict[str, CompileKey]:
        """Return what the graph depends on, by its name; `architecture` is a GPU's, as in `Runtime`."""
        facts = f"{self.dtype.name} {self.geometry}" + (f" cache of {self.kv_format}" if self.kv_format else "")
        facts += "" if self.output == "logits" else f" {self.output}"
        return {decoder.STEP: CompileKey(facts, (MODELS,), architecture)}

    def build(self, module: Module, device: DeviceRef) -> None:
        """Adds the graph to `module`."""
        decoder.build_step(self.geometry, self.dtype, module, device, kv_format=self.kv_format, output=self.output)

    def program(self, weights: Mapping[str, np.ndarray], buffers: Sequence[np.ndarray | None]) -> Program:
        """The step as a program for this CPU.

        Args:
            weights: As for `DecoderModel`.
            buffers: For each input of the graph the array that it always is, or None for what a step brings.

        Raises:
            UnknownGraph: a program does not know one of the step's operations.
            ToolchainError: as `libraries.load`.
        """
        graph = self._read(buffers)
        return Program(graph, {name: weights[name] for name in graph.weights}, buffers)

    def kernels(self) -> list[Kernel]:
        """The kernels that the program calls. Raises `UnknownGraph` as `program` does."""
        kind = numpy_dtype(cache_dtype(self.dtype, self.kv_format))

        def empty(shape: Sequence[int | str], kind: np.dtype[Any] | type = np.float32) -> np.ndarray:
            return np.empty([int(size) for size in shape], kind)

        def cache(*, windows: bool) -> np.ndarray:
            return empty(decoder.cache_shape(self.geometry, 1, 1, self.kv_format, windows=windows), kind)

        buffers: list[np.ndarray | None] = [*[None] * 4, cache(windows=False)]
        if self.geometry.separate_windows:
            buffers += [None, cache(windows=True)]
        if self.geometry.recurrence is not None:
            buffers += [*[None] * 4, *(empty(each) for each in decoder.state_shapes(self.geometry, 1))]
        return graph_kernels(self._read([*buffers, *[None] * (1 + self.geometry.has_window_lengths)]))

    def libraries(self) -> list[Library]:
        """The libraries in which they lie."""
        return list(dict.fromkeys(kernel.library for kernel in self.kernels()))

    def _read(self, buffers: Sequence[np.ndarray | None]) -> ReadGraph:
        return read(
            lambda module, library: decoder.build_step(
                self.geometry,
                self.dtype,
                module,
                kv_format=self.kv_format,
                adapters=self.adapters,
                library=library,
                draft=self.draft,
                output=self.output,
            ),
            buffers,
        )


def read(build: Callable[[Module, KernelLibrary], None], buffers: Sequence[np.ndarray | None]) -> ReadGraph:
    """The graph that `build` adds to a module, read.

    Args:
        build: Its second argument is the graph's library of kernels.
        buffers: As for `StepGraph.program`.

    Raises:
        UnknownGraph: as `read_graph`.
    """
    with graph_building():
        module = Module()
        build(module, KernelsInLibraries())
        return read_graph(module, buffers)


def demo_libraries() -> list[Library]:
    """The libraries that the step of `paged-kv demo` calls."""
    return StepGraph.of(load_config(FOLDER), DEMO_DTYPE).libraries()


def compile_checkpoint(
    checkpoint: Path,
    dtype: str | None,
    kv_format: KVFormat | None = None,
    cache_rotation: CacheRotation | None = None,
) -> str:
    """Builds what the step of a checkpoint needs on this machine, or finds it there; returns what it is, in words.

    Args:
        checkpoint: A Hugging Face folder, or a GGUF file.
        dtype: "float32" or "bfloat16"; the checkpoint's own where None.
        kv_format, cache_rotation: As in `DecoderModel`.

    Raises:
        ContractError: the model cannot have that `cache_rotation`.
        CheckpointError: there is no checkpoint that this package runs.
        ToolchainError: it cannot be compiled or kept.
    """
    runtime = default_runtime()
    source = open_source(checkpoint).on(runtime.device)
    config = with_separate_windows(with_cache_rotation(source.config, cache_rotation))
    step = StepGraph.of(config, DType.bfloat16 if (dtype or config.dtype) == "bfloat16" else DType.float32, kv_format)
    if runtime.device.is_cpu():
        try:
            kernels = step.kernels()
        except UnknownGraph as unknown:
            logger.info("the step is compiled by MAX: %s", unknown)
        else:
            load(kernels)
            return f"{len({kernel.library for kernel in kernels})} libraries of kernels"
    (path,) = compile_ahead(
        runtime.session, step.keys(runtime.architecture), lambda module, _: step.build(module, runtime.device)
    )
    return str(path)
