"""Compiled graphs on disk: built once, read back in well under a second.

MAX keeps a cache of its own, but a process that uses it still parses the Mojo package and builds every graph
(some 4 s). A file of ours holds the finished artefact; its name is a digest of all that went into it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from max.driver import get_virtual_cpu_target
from max.engine import InferenceSession, Model, read
from max.graph import Module

from paged_kv import graphs
from paged_kv.cpu_target import CpuInfo
from paged_kv.folders import cache_folder
from paged_kv.graphs.ops import kernels


def load_graphs(
    session: InferenceSession,
    key: str,
    build: Callable[[Module], None],
    *,
    weights: Mapping[str, Any] | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> dict[str, Model]:
    """The models of the graphs that `build` adds to a module, by graph name.

    Args:
        key: What `build` depends on besides this package's sources: dtypes, sizes, configuration.
        build: Called only where no artefact of this key, these sources, versions and this CPU exists.
        weights: Values for the graphs' weights by name; an artefact holds none.
        on_compile: Called before a compile, which takes some 15 s or more.
    """
    path = cache_folder() / "compiled" / f"{_digest(key)}.mef"
    if path.exists():
        try:
            return session.init_all(read(path), weights_registry=weights)
        except (RuntimeError, ValueError, OSError):
            path.unlink(missing_ok=True)  # written by a process that was killed, or damaged since
    on_compile()
    module = Module()
    build(module)
    compiled = session.compile(module, custom_extensions=[kernels()])
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    compiled.export_mef(str(unfinished))
    os.replace(unfinished, path)
    return session.init_all(compiled, weights_registry=weights)


def _digest(key: str) -> str:
    """Of everything that a compiled graph depends on."""
    digest = hashlib.sha256()
    flags = " ".join(sorted(CpuInfo.read().flags))
    for fact in (key, version("max"), version("mojo"), get_virtual_cpu_target(), flags):
        digest.update(f"{fact}\n".encode())
    builders = [*Path(graphs.__file__).parent.glob("*.py"), Path(__file__).with_name("runtime.py")]
    for source in sorted([*kernels().glob("*.mojo"), *builders]):
        digest.update(f"{source.name} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
