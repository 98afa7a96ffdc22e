"""`paged-kv compile --serve`: builds MAX's pipeline as the server does, and keeps each graph that it compiles."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from max.driver import set_virtual_cpu_target
from max.engine import InferenceSession, Model
from max.graph import Graph

from paged_kv.errors import ContractError
from paged_kv.runtime.artefacts import compile_ahead
from paged_kv.runtime.graph_family import GraphFamily
from paged_kv.runtime.store import Store
from paged_kv.serve.compiled_graphs import CompiledGraphs, GraphOfMax, session_of_cpu
from paged_kv.serve.environment import check_environment, import_alone
from paged_kv.serve.launch import Serving, arguments_ahead


class GraphsAhead(CompiledGraphs):
    """Compiles each graph that MAX or `ServedModel` is about to load, into a folder (None: the cache folder).

    The CPU target may be another machine's: code is loaded, as MAX does with what it compiles, and not run.
    """

    def __init__(self, folder: Path | None, copies: Path) -> None:
        super().__init__(folder, copies)
        self.files: list[Path] = []
        """Of the graphs, in the order in which they were asked for."""

    def load_step(self, session: InferenceSession, step: GraphFamily) -> Model:
        """Nothing that runs: no weights are read."""
        self.files += compile_ahead(session, step.keys, step.build, self._folder)
        return cast(Model, None)

    def claim_import(self, graph: Graph) -> Path | None:
        key = GraphOfMax.of(graph)
        if key is None:
            return None
        (file,) = compile_ahead(session_of_cpu(), {graph.name: key}, graph, self._folder)
        self.files.append(file)
        (artefact,) = Store(file.parent, hidden=False).find([file.stem])
        return self.copy(graph.name, artefact.content)


def compile_for_server(serving: Serving, target: str | None, out: Path | None) -> list[Path]:
    """Compiles, or finds compiled, what such a server loads; returns the files.

    MAX makes its whole pipeline, as in the server, but for the weights. It and its target are one for the process: a
    process that compiles for a server does nothing else.

    Args:
        serving: As for `serve`; its address and its number of requests do not matter.
        target: The CPU to compile for, one of `REQUIRED_FLAGS`; this one where None.
        out: The folder to keep it in, the cache folder where None.

    Raises:
        CheckpointError, ContractError: as `serve`.
        ToolchainError: the environment lacks what MAX's server needs, or a graph cannot be compiled or kept.
    """
    check_environment()
    import_alone()
    import click
    from max._entrypoints.pipelines import cli_warm_cache

    if target is not None:
        set_virtual_cpu_target(target)
    with TemporaryDirectory(prefix="paged-kv-") as copies:
        graphs = InferenceSession.default_mef_store = GraphsAhead(out, Path(copies))
        try:
            cli_warm_cache.main(arguments_ahead(serving), "paged-kv compile --serve --", standalone_mode=False)
        except click.ClickException as error:
            raise ContractError(error.format_message()) from None  # it travels to another process
    return graphs.files
