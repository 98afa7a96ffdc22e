"""Compiled graphs on disk: built once, read back in well under a second.

MAX keeps a cache of its own, but a process that uses it still parses the Mojo package and builds every graph
(some 4 s). A file of ours holds the finished artefact; its name is a digest of all that went into it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from max.driver import get_virtual_cpu_target
from max.engine import CompiledModel, InferenceSession, Model, read
from max.graph import Module

from paged_kv import graphs
from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cpu_target import CpuInfo
from paged_kv.runtime.folders import cache_folder


def load_graphs(
    session: InferenceSession,
    keys: Mapping[str, str],
    build: Callable[[Module, Sequence[str]], None],
    *,
    weights: Mapping[str, Any] | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> dict[str, Model]:
    """The models of some graphs, by graph name; those that the disk has not are compiled together.

    Args:
        keys: For each graph, by name, what it depends on besides this package's sources: dtypes, sizes, configuration.
        build: Adds the graphs of the given names to a module.
        weights: Values for the graphs' weights by name; what is on disk holds none.
        on_compile: Called before a compile, which takes some 25 s or more.
    """
    folder = cache_folder() / "compiled"
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{_digest(key)}.mef" for name, key in keys.items()}
    models: dict[str, Model] = {}
    # Graphs that were compiled together lie in one file, which has a name for each of them.
    for path in {path.resolve() for path in paths.values() if path.exists()}:
        try:
            models |= session.init_all(read(path), weights_registry=weights)
        except (RuntimeError, ValueError, OSError):
            path.unlink(missing_ok=True)  # written by a process that was killed, or damaged since
    missing = [name for name in keys if name not in models]
    if missing:
        on_compile()
        module = Module()
        build(module, missing)
        compiled = session.compile(module, custom_extensions=[kernels()])
        _store(compiled, [paths[name] for name in missing])
        models |= session.init_all(compiled, weights_registry=weights)
    return {name: models[name] for name in keys}


def _store(compiled: CompiledModel, paths: Sequence[Path]) -> None:
    """Writes one file under several names, each of which appears when the file is whole."""
    first, *others = paths
    unfinished = first.with_suffix(f".{os.getpid()}")
    compiled.export_mef(str(unfinished))
    os.replace(unfinished, first)
    for path in others:
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(first.name)
        os.replace(unfinished, path)


def _digest(key: str) -> str:
    """Of everything that a compiled graph depends on."""
    digest = hashlib.sha256()
    flags = " ".join(sorted(CpuInfo.read().flags))
    for fact in (key, version("max"), version("mojo"), get_virtual_cpu_target(), flags):
        digest.update(f"{fact}\n".encode())
    builders = [*Path(graphs.__file__).parent.rglob("*.py"), Path(__file__).with_name("session.py")]
    for source in sorted([*kernels().rglob("*.mojo"), *builders]):
        digest.update(f"{source.name} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
