"""Graphs that are compiled once and then read from disk in well under a second.

MAX keeps a cache of its own, but a process that uses it still reads the Mojo package and builds every graph. Here a
file holds the finished artefact, named by the digest of all that it depends on. It lies in the user's cache folder, or
came with the package (`compiled_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

from max._mlir_context import ensure_default_mlir_context
from max.driver import get_virtual_cpu_target
from max.engine import CompiledModel, InferenceSession, Model, read
from max.graph import Graph, Module

from paged_kv.errors import ToolchainError
from paged_kv.graphs.ops import compiled_kernels, kernels
from paged_kv.runtime.artefact_folder import ArtefactFolder, user_artefacts, warn_not_kept
from paged_kv.runtime.compile_key import Key, Sources, toolchain
from paged_kv.runtime.compiled_ahead import TargetFolder, target_folders
from paged_kv.runtime.cpu_target import CpuInfo, check_cpu_runs, usable_targets
from paged_kv.runtime.kernel_library import kernel_library

_COMPILING = Lock()


def load_graphs(
    session: InferenceSession,
    keys: Mapping[str, Key],
    build: Callable[[Module, Sequence[str]], None],
    *,
    weights: Mapping[str, Any] | None = None,
    on_compile: Callable[[], None] = lambda: None,
    exact: bool = False,
    compiled_ahead: Path | None = None,
) -> dict[str, Model]:
    """The models of some graphs, by graph name; those that are not on disk are compiled together.

    Args:
        session: Of the device that the graphs are for.
        keys: For each graph, by name, what it depends on.
        build: Adds the graphs of the given names to a module.
        weights: Values for the graphs' weights by name; an artefact holds none.
        on_compile: Called before a compile, which takes some 25 s or more.
        exact: Compile rather than take what came with the package for a lower CPU target.
        compiled_ahead: A folder of `compile_ahead`, which is searched first.

    Raises:
        ToolchainError: the CPU lacks a feature of the target in force; there is no place for a cache folder, or
            another user can write to its artefacts, and they are needed; another user can write to `compiled_ahead`;
            or the Mojo sources or graphs do not compile. That nothing can be written, or that a file of the package
            is damaged, is a `RuntimeWarning`.
    """
    cpu = CpuInfo.read()
    check_cpu_runs(get_virtual_cpu_target(), cpu)
    sources = Sources.installed()
    digests = _digests(keys, sources)
    models: dict[str, Model] = {}
    for target, found_in in _places(cpu, exact, compiled_ahead):
        if len(models) == len(keys):
            break
        named = digests if target is None else _digests(keys, sources, target)
        wanted = {name: digest for name, digest in named.items() if name not in models}
        models |= _loaded(session, found_in, wanted, weights)
    missing = [name for name in keys if name not in models]
    if missing:
        on_compile()
        compiled = compile_graphs(session, missing, build)
        # A source that was edited meanwhile may or may not be in what was compiled: such an artefact is not stored.
        if _digests(keys, Sources.installed()) == digests:
            reason = user_artefacts().store([digests[name] for name in missing], lambda path: export(compiled, path))
            if reason is not None:
                warn_not_kept(reason)
        models |= _named(session.init_all(compiled, weights_registry=weights), missing)
    return {name: models[name] for name in keys}


def find_graph(key: Key, compiled_ahead: Path | None = None) -> bytes | None:
    """The artefact of one graph, for a reader that loads it itself: where `load_graphs` looks for it, or None.

    Raises:
        ToolchainError: as `load_graphs`.
    """
    cpu, sources = CpuInfo.read(), Sources.installed()
    check_cpu_runs(get_virtual_cpu_target(), cpu)
    for target, folder in _places(cpu, exact=False, compiled_ahead=compiled_ahead):
        for artefact in folder.find([key.digest(sources, toolchain(target))]):
            return artefact.content
    return None


def where_graphs_lie(keys: Mapping[str, Key]) -> dict[str, str]:
    """Where `load_graphs` would take each graph from, in words; those that it would compile are left out.

    Raises:
        ToolchainError: as `load_graphs`.
    """
    cpu, sources, in_force = CpuInfo.read(), Sources.installed(), get_virtual_cpu_target()
    check_cpu_runs(in_force, cpu)
    found: dict[str, str] = {}
    for target, folder in _places(cpu, exact=False):
        origin = "with the package" if isinstance(folder, TargetFolder) else "in the cache"
        named = _digests({name: key for name, key in keys.items() if name not in found}, sources, target)
        whole = {digest for artefact in folder.find(named.values()) for digest in artefact.digests}
        place = f"{origin}, for {target or in_force or 'this CPU'}"
        found |= {name: place for name, digest in named.items() if digest in whole}
    return found


def _places(
    cpu: CpuInfo, exact: bool, compiled_ahead: Path | None = None
) -> Iterator[tuple[str | None, ArtefactFolder | TargetFolder]]:
    """Where compiled graphs may lie, with the CPU target that they are for (None: the one in force), the best first.

    A folder that the user names comes first. What was compiled here for this very CPU is better than what came with the
    package for a lower target.
    """
    usable = usable_targets(get_virtual_cpu_target(), cpu)
    if compiled_ahead is not None:
        folder_of_user = ahead_folder(compiled_ahead)
        yield from ((target, folder_of_user) for target in (None, *([] if exact else usable[1:])))
    for _, folder in target_folders(usable[:1], cpu):
        yield None, folder
    yield None, user_artefacts()
    if not exact:
        yield from target_folders(usable[1:], cpu)


def _loaded(
    session: InferenceSession,
    folder: ArtefactFolder | TargetFolder,
    digests: Mapping[str, str],
    weights: Mapping[str, Any] | None,
) -> dict[str, Model]:
    """Those of the graphs that a folder has."""
    models: dict[str, Model] = {}
    for artefact in folder.find(digests.values()):
        try:
            loaded = session.init_all(read(BytesIO(artefact.content)), weights_registry=weights)
        except (RuntimeError, ValueError, OSError):
            folder.remove(artefact.path)  # whole, but nothing that MAX reads
            continue
        # Graphs that were compiled together with these may have been built from other sources than today's.
        valid = artefact.digests
        current = [name for name in digests if digests[name] in valid]
        models |= {name: model for name, model in _named(loaded, current).items() if digests.get(name) in valid}
    return models


def compile_ahead(
    session: InferenceSession,
    keys: Mapping[str, Key],
    build: Callable[[Module, Sequence[str]], None] | Graph,
    folder: Path | None,
) -> list[Path]:
    """Compiles those of the graphs that `folder` (None: the cache folder) has not, without their weights.

    What the cache folder has is copied from there. A graph that somebody else built stands for the builder of one.

    Returns:
        The file of each graph.

    Raises:
        ToolchainError: as `load_graphs`; or a file cannot be written.
    """
    kept = user_artefacts() if folder is None else ArtefactFolder(folder, hidden=False)
    digests = _digests(keys, Sources.installed())

    def missing() -> list[str]:
        found = {digest for artefact in kept.find(digests.values()) for digest in artefact.digests}
        return [name for name in keys if digests[name] not in found]

    def store(names: Iterable[str], write: Callable[[Path], object]) -> None:
        reason = kept.store(sorted(names), write)
        if reason is not None:
            raise ToolchainError(f"the compiled graphs cannot be kept: {reason}")

    if folder is not None:
        for artefact in user_artefacts().find(digests[name] for name in missing()):
            store(artefact.digests, partial(Path.write_bytes, data=artefact.content))
    if names := missing():
        compiled = compile_graphs(session, names, build)
        if _digests(keys, Sources.installed()) != digests:
            raise ToolchainError("a source was edited while it was compiled: try again")
        store([digests[name] for name in names], partial(export, compiled))
    return [kept.path_of(digest) for digest in digests.values()]


def ahead_folder(folder: Path) -> ArtefactFolder:
    """A folder of `compile_ahead` that is there.

    Raises:
        ToolchainError: it is not, or another user can write to it.
    """
    if not folder.is_dir():
        raise ToolchainError(
            f"{folder} is no folder of compiled steps: make it by paged-kv compile --out, with --serve for a server"
        )
    return ArtefactFolder(folder, hidden=False)


def compile_graphs(
    session: InferenceSession, names: Sequence[str], build: Callable[[Module, Sequence[str]], None] | Graph
) -> CompiledModel:
    """Builds and compiles the graphs of the given names, in whatever thread; one thread at a time.

    A graph that is built already knows its own extensions.

    Raises:
        ToolchainError: the Mojo sources do not compile, or MAX cannot compile the graphs (its own cache is on a disk
            that is full).
    """
    with _COMPILING, ensure_default_mlir_context():  # MAX has entered it in the main thread alone
        module: Module | Graph
        if isinstance(build, Graph):
            module, extensions = build, []
        else:
            module, extensions = Module(), [kernel_library(kernels())]
            with compiled_kernels(extensions[0]):
                build(module, names)
        try:
            return session.compile(module, custom_extensions=extensions)
        except RuntimeError as error:
            raise ToolchainError(f"MAX cannot compile {', '.join(names)}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What the compiler says of an error, in one line: its own lines are in the first of the errors that led to it."""
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
    """`loaded` by the names that were asked for: MAX's own cache gives a graph that equals an older one its name."""
    if len(loaded) == len(names) == 1:
        return {names[0]: next(iter(loaded.values()))}
    return loaded


def _digests(keys: Mapping[str, Key], sources: Sources, target: str | None = None) -> dict[str, str]:
    """The name of each graph's artefact, for a CPU target (None: the one in force)."""
    tools = toolchain(target)
    return {name: key.digest(sources, tools) for name, key in keys.items()}
