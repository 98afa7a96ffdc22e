"""A compiler that only writes down what it was given, in MAX's place."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from paged_kv.graphs import ops
from paged_kv.runtime import artefacts
from paged_kv.runtime.compile_key import CompileKey

NAMES = ("first", "second", "third")


class Compiled:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def export_mef(self, path: str) -> None:
        Path(path).write_text(" ".join(self.names))


class Session:
    """Compiles and loads lists of names."""

    def __init__(self) -> None:
        self.compiles: list[list[str]] = []

    def compile(self, module: list[str], custom_extensions: Any) -> Compiled:
        del custom_extensions
        self.compiles.append(list(module))
        return Compiled(module)

    def init_all(self, compiled: Compiled, weights_registry: Mapping[str, Any] | None) -> dict[str, str]:
        del weights_registry
        return {name: f"model {name}" for name in compiled.names}


def install(monkeypatch: pytest.MonkeyPatch, caches: Path) -> Path:
    """Puts it in MAX's place, and a cache folder in `caches`; returns that of the artefacts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    monkeypatch.setattr(artefacts, "read", _read)
    monkeypatch.setattr(artefacts, "Module", list)
    monkeypatch.setattr(artefacts, "kernel_library", lambda sources: sources)
    return caches / "paged-kv" / "compiled"


def _read(file: BinaryIO) -> Compiled:
    """A file of anything but names is damaged."""
    names = file.read().decode().split()
    if not names or not set(names) <= set(NAMES):
        raise RuntimeError("damaged")
    return Compiled(names)


def keys(names: Iterable[str], facts: str = "") -> dict[str, CompileKey]:
    return {name: CompileKey(name + facts, ops.__name__) for name in names}


def build(module: list[str], missing: Iterable[str]) -> None:
    module.extend(missing)


def compiles(run: Callable[[Session], object]) -> list[list[str]]:
    """The lists of names that `run` had to compile."""
    session = Session()
    run(session)
    return session.compiles
