"""Graphs that are compiled once and then read from disk in well under a second.

MAX keeps a cache of its own, but a process that uses it still reads the Mojo package and builds every graph. Here a
file holds the finished artefact, named by the digest of all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from max.engine import InferenceSession, Model, read
from max.graph import Module

from paged_kv.graphs.ops import compiled_kernels, kernels
from paged_kv.runtime.artefact_folder import user_artefacts
from paged_kv.runtime.compile_key import CompileKey, Sources, toolchain
from paged_kv.runtime.kernel_library import kernel_library


def load_graphs(
    session: InferenceSession,
    keys: Mapping[str, CompileKey],
    build: Callable[[Module, Sequence[str]], None],
    *,
    weights: Mapping[str, Any] | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> dict[str, Model]:
    """The models of some graphs, by graph name; those that are not on disk are compiled together.

    Args:
        session: Of the device that the graphs are for.
        keys: For each graph, by name, what it depends on.
        build: Adds the graphs of the given names to a module.
        weights: Values for the graphs' weights by name; an artefact holds none.
        on_compile: Called before a compile, which takes some 25 s or more.

    Raises:
        ToolchainError: the cache folder cannot be used, another user can write to its artefacts, or the Mojo sources do
            not compile.
    """
    folder = user_artefacts()
    digests = _digests(keys)
    models: dict[str, Model] = {}
    for path, valid in folder.find(digests.values()).items():
        try:
            loaded = session.init_all(read(path), weights_registry=weights)
        except (RuntimeError, ValueError, OSError):
            folder.remove(path)  # damaged
            continue
        # Graphs that were compiled together with these may have been built from other sources than today's.
        current = [name for name in keys if digests[name] in valid]
        models |= {name: model for name, model in _named(loaded, current).items() if digests.get(name) in valid}
    missing = [name for name in keys if name not in models]
    if missing:
        on_compile()
        library = kernel_library(kernels())
        module = Module()
        with compiled_kernels(library):
            build(module, missing)
        compiled = session.compile(module, custom_extensions=[library])
        # A source that was edited meanwhile may or may not be in what was compiled: such an artefact is not stored.
        if _digests(keys) == digests:
            folder.store([digests[name] for name in missing], lambda path: compiled.export_mef(str(path)))
        models |= _named(session.init_all(compiled, weights_registry=weights), missing)
    return {name: models[name] for name in keys}


def _named(loaded: Mapping[str, Model], names: Sequence[str]) -> Mapping[str, Model]:
    """`loaded` by the names that were asked for: MAX's own cache gives a graph that equals an older one its name."""
    if len(loaded) == len(names) == 1:
        return {names[0]: next(iter(loaded.values()))}
    return loaded


def _digests(keys: Mapping[str, CompileKey]) -> dict[str, str]:
    """The name of each graph's artefact."""
    sources, tools = Sources.installed(), toolchain()
    return {name: key.digest(sources, tools) for name, key in keys.items()}
