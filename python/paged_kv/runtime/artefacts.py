"""Graphs that are compiled once and then read from disk in well under a second.

MAX keeps a cache of its own, but a process that uses it still reads the Mojo package and builds every graph. Here a
file holds the finished artefact, named by the digest of all that it depends on (`compile_key.py`). It lies in the
user's cache folder (`store.py`), in a folder that the user names, or came with the package (`installed.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from max.driver import get_virtual_cpu_target
from max.engine import CompiledModel, InferenceSession, Model, read
from max.engine.api import _COMPILATION_LOCK
from max.graph import Module

from paged_kv.errors import ToolchainError
from paged_kv.graphs.ops import compiled_kernels, kernels
from paged_kv.runtime.artefact_paths import origin, places
from paged_kv.runtime.compile_key import CompileKey, Sources, digests_of
from paged_kv.runtime.cpu_target import CpuInfo, check_cpu_runs
from paged_kv.runtime.graph_reading import graph_building
from paged_kv.runtime.installed import InstalledStore
from paged_kv.runtime.kernel_library import kernel_library
from paged_kv.runtime.store import Artefact, Store, user_store


def load_graphs(
    session: InferenceSession,
    keys: Mapping[str, CompileKey],
    build: Callable[[Module, Sequence[str]], None],
    *,
    weights: Mapping[str, Any] | None = None,
    on_compile: Callable[[], None] = lambda: None,
    exact: bool = False,
) -> dict[str, Model]:
    """The models of some graphs, by graph name; those that are not on disk are compiled together.

    Args:
        session: The session of the device that the graphs are for.
        keys: For each graph, by name, what it depends on.
        build: Adds the graphs of the given names to a module.
        weights: Values for the graphs' weights by name; an artefact holds none.
        on_compile: Called before a compile, which takes some 25 s or more.
        exact: Compile rather than take what came with the package for a lower CPU target.

    Raises:
        ToolchainError: the CPU lacks a feature of the target in force; there is no place for a cache folder, or
            another user can write to its artefacts, and they are needed; or the Mojo sources or graphs do not
            compile. That nothing can be written, or that a file of the package is damaged, is a `RuntimeWarning`.
    """
    models: dict[str, Model] = {}
    missing = dict(keys)
    for _, store, artefact, names in _search(missing, exact=exact):
        try:
            loaded = session.init_all(read(BytesIO(artefact.content)), weights_registry=weights)
        except (RuntimeError, ValueError, OSError):
            store.remove(artefact.path)  # whole, but nothing that MAX reads
            continue
        # Of graphs that were compiled together, others than `names` may be of older sources.
        for name, model in _named(loaded, names).items():
            if name in names:
                models[name] = model
                del missing[name]
    if missing:
        on_compile()
        digests = digests_of(missing, Sources.installed())
        compiled = compile_graphs(session, list(missing), build)
        # A source that was edited meanwhile may or may not be in what was compiled: such an artefact is not kept.
        if digests_of(missing, Sources.installed()) == digests:
            reason = user_store().keep(list(digests.values()), partial(export, compiled))
            if reason is not None:
                warnings.warn(f"compiled graphs are not kept ({reason}): each start compiles them", RuntimeWarning, 1)
        models |= _named(session.init_all(compiled, weights_registry=weights), list(missing))
    return {name: models[name] for name in keys}


def where_graphs_lie(keys: Mapping[str, CompileKey]) -> dict[str, str]:
    """The place of each graph in words; graphs that `load_graphs` would compile are left out.

    Raises:
        ToolchainError: as `load_graphs`.
    """
    origins: dict[str, str] = {}
    missing = dict(keys)
    for target, store, _, names in _search(missing):
        for name in names:
            origins[name] = origin(store, target)
            del missing[name]
    return origins


def _search(
    missing: Mapping[str, CompileKey], *, exact: bool = False
) -> Iterator[tuple[str | None, Store | InstalledStore, Artefact, list[str]]]:
    """Each artefact that has some of the graphs: its CPU target, its store, it, the graphs' names; best first.

    The caller removes from `missing` what it got. The next place is asked for the rest.
    """
    cpu, sources = CpuInfo.read(), Sources.installed()
    check_cpu_runs(get_virtual_cpu_target(), cpu)
    for target, store in places(cpu, user_store, exact=exact):
        digests = digests_of(missing, sources, target)
        for artefact in store.find(digests.values()):
            yield target, store, artefact, [name for name in digests if digests[name] in artefact.digests]
        if not missing:
            return


def compile_ahead(
    session: InferenceSession, keys: Mapping[str, CompileKey], build: Callable[[Module, Sequence[str]], None]
) -> list[Path]:
    """Compiles the graphs that the cache folder lacks, without their weights.

    Returns:
        The file of each graph.

    Raises:
        ToolchainError: as `load_graphs`; or a file cannot be written.
    """
    store = user_store()
    digests = digests_of(keys, Sources.installed())
    stored = {digest for artefact in store.find(digests.values()) for digest in artefact.digests}
    if names := [name for name in keys if digests[name] not in stored]:
        compiled = compile_graphs(session, names, build)
        if digests_of(keys, Sources.installed()) != digests:
            raise ToolchainError("a source was edited while it was compiled: try again")
        reason = store.keep(sorted(digests[name] for name in names), partial(export, compiled))
        if reason is not None:
            raise ToolchainError(f"the compiled graphs cannot be kept: {reason}")
    return [store.path_of(digest) for digest in digests.values()]


def compile_graphs(
    session: InferenceSession, names: Sequence[str], build: Callable[[Module, Sequence[str]], None]
) -> CompiledModel:
    """Builds and compiles the graphs of the given names, in whatever thread; one thread at a time.

    Raises:
        ToolchainError: the Mojo sources do not compile, or MAX cannot compile the graphs (its own cache is on a disk
            that is full).
    """
    with graph_building():
        module, library = Module(), kernel_library(kernels())
        with compiled_kernels(library):
            build(module, names)
        try:
            return session.compile(module, custom_extensions=[library])
        except RuntimeError as error:
            raise ToolchainError(f"MAX cannot compile {', '.join(names)}: {_reason(error)}") from error
        finally:
            # A thread of MAX's pool releases it in Python, after `compile` has returned or raised. A process that
            # ends before that crashes (docs/notes/exit.md).
            with _COMPILATION_LOCK:
                pass


def _reason(error: BaseException) -> str:
    """The compiler's error lines, joined to one: they are in the first error of the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return "; ".join([line for line in lines if "error:" in line] or lines[:1])


def export(compiled: CompiledModel, path: Path) -> None:
    """Writes compiled graphs to a file.

    Raises:
        OSError: that cannot be done, which MAX says in errors of other types.
    """
    try:
        compiled.export_mef(str(path))
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error


def _named(loaded: Mapping[str, Model], names: Sequence[str]) -> Mapping[str, Model]:
    """`loaded` by the requested names: MAX's own cache gives a graph that equals an older one the older's name."""
    if len(loaded) == len(names) == 1:
        return {names[0]: next(iter(loaded.values()))}
    return loaded
