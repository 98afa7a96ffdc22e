"""The compiled graphs of the server, among this package's artefacts: found there, or compiled and kept there.

There are three: the step of the model, which this package builds, and MAX's sampler and log-probabilities. Before MAX
compiles a graph of its own it asks the `MefStore` of the process. Its own cache would do on the machine that compiled,
but its keys hold that machine; here a graph is known by what it computes, the compilers and the CPU target alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from max.driver import CPU
from max.engine import InferenceSession, MefStore, Model
from max.graph import Graph

from paged_kv.errors import ToolchainError
from paged_kv.runtime.artefacts import compile_ahead, find_graph, load_graphs
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.graph_family import GraphFamily
from paged_kv.serve.launch import COMPILED

logger = logging.getLogger("paged_kv.serve")


@dataclass(frozen=True)
class GraphOfMax:
    """A graph that MAX builds of its own kernels."""

    text: str
    """All that it computes, as MAX prints it: operations, types, constants."""

    @classmethod
    def of(cls, graph: Graph) -> GraphOfMax | None:
        """None where the text does not say it all: kernels that are not MAX's."""
        return None if graph.kernel_libraries_paths else cls(repr(graph))

    def digest(self, sources: Sources, toolchain: str) -> str:
        """As `CompileKey`; this package's sources have no part in it, and MAX's version stands for its kernels."""
        del sources
        return hashlib.sha256(f"{toolchain}\n{self.text}".encode()).hexdigest()[:32]


class CompiledGraphs(MefStore):
    """What MAX asks before it compiles, and `ServedModel` for the step.

    Args:
        folder: Of graphs that were compiled ahead, searched before the cache folder.
        copies: A folder for artefacts as MAX reads them, from files without a seal.
    """

    def __init__(self, folder: Path | None = None, copies: Path | None = None) -> None:
        super().__init__(directories=(), exporting=False, key=lambda _: None, verify_body=False)
        self._folder = folder
        self._copies = copies

    @staticmethod
    def in_force() -> CompiledGraphs:
        """What `store_for_max` or `compile_for_server` has put there, or one that looks into the cache folder alone."""
        store = InferenceSession.default_mef_store
        return store if isinstance(store, CompiledGraphs) else CompiledGraphs()

    def load_step(self, session: InferenceSession, step: GraphFamily) -> Model:
        """The step with its weights, compiled where it is nowhere.

        Raises:
            ToolchainError: as `load_graphs`.
        """

        def say() -> None:
            logger.info("compiling the step: about a minute, once for this model and machine")

        (model,) = load_graphs(
            session, step.keys, step.build, weights=step.weights(), on_compile=say, compiled_ahead=self._folder
        ).values()
        return model

    def claim_import(self, graph: Graph) -> Path | None:
        """A file of the graph for MAX to read; None where MAX is to compile it, since nothing can be kept.

        Raises:
            ToolchainError: as `load_graphs`.
        """
        key = GraphOfMax.of(graph)
        if key is None:
            return None
        content = find_graph(key, self._folder)
        if content is None:
            logger.info("compiling %s of MAX: half a minute, once for these options and this machine", graph.name)
            try:
                compile_ahead(session_of_cpu(), {graph.name: key}, graph, None)
            except ToolchainError as error:
                logger.warning("%s", error)
                return None
            content = find_graph(key)
        return None if content is None else self.copy(graph.name, content)

    def copy(self, name: str, content: bytes) -> Path | None:
        """An artefact's content in a file for MAX."""
        if self._copies is None:
            return None
        path = self._copies / f"{name}.mef"
        path.write_bytes(content)
        return path


@contextmanager
def store_for_max(on_the_cpu: bool) -> Iterator[None]:
    """While MAX makes a pipeline: it finds its graphs among our artefacts, if they are the CPU's.

    Where somebody has put a store there already, that one stays.
    """
    if not on_the_cpu or InferenceSession.default_mef_store is not None:
        yield
        return
    named = os.environ.get(COMPILED)
    with TemporaryDirectory(prefix="paged-kv-") as copies:
        InferenceSession.default_mef_store = CompiledGraphs(Path(named) if named else None, Path(copies))
        try:
            yield
        finally:
            InferenceSession.default_mef_store = None


def session_of_cpu() -> InferenceSession:
    """One to compile in: MAX does not say which session asks."""
    return InferenceSession(devices=[CPU()])
