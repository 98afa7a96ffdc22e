"""A compiler that only writes down what it was given, in MAX's place."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from paged_kv.runtime import artefact_paths, artefacts, compile_key, installed
from paged_kv.runtime.compile_key import CompileKey, Sources
from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target

NAMES = ("first", "second", "third")


class Compiled:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def export_mef(self, path: str) -> None:
        try:
            Path(path).write_text(" ".join(self.names) + " " * 10_000)
        except OSError as error:  # as MAX has it
            raise ValueError(error.strerror) from None


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
    sources = Sources.installed()
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    monkeypatch.setattr(artefacts, "read", _read)
    monkeypatch.setattr(artefacts, "Module", list)
    monkeypatch.setattr(artefacts, "kernel_library", lambda sources: sources)
    monkeypatch.setattr(installed, "kernel_roots", list)
    monkeypatch.setattr(Sources, "installed", lambda: sources)  # read once
    return caches / "paged-kv" / "compiled"


def set_cpu(monkeypatch: pytest.MonkeyPatch, flags: Iterable[str], target: str | None = None) -> None:
    """A CPU that reports these flags, and the target in force (None: its best one)."""
    cpu = CpuInfo("x86_64", "znver5 by its name", frozenset(flags))
    in_force = target or choose_cpu_target(cpu) or ""
    monkeypatch.setattr(CpuInfo, "read", lambda: cpu)
    for module in (artefacts, compile_key, artefact_paths):
        monkeypatch.setattr(module, "get_virtual_cpu_target", lambda: in_force)


def edit_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source differs after each compile."""

    def compile_(session: Session, *arguments: Any) -> Compiled:
        monkeypatch.setattr(compile_key, "toolchain", lambda target=None: f"edited {len(session.compiles)} {target}")
        return compile_graphs(session, *arguments)  # type: ignore[arg-type,return-value]

    compile_graphs = artefacts.compile_graphs
    monkeypatch.setattr(artefacts, "compile_graphs", compile_)


def _read(file: BinaryIO) -> Compiled:
    """A file of anything but names is damaged."""
    names = file.read().decode().split()
    if not names or "unreadable" in names:
        raise RuntimeError("damaged")
    return Compiled(names)


def keys(names: Iterable[str], facts: str = "") -> dict[str, CompileKey]:
    return {name: CompileKey(name + facts) for name in names}


def build(module: list[str], missing: Iterable[str]) -> None:
    module.extend(missing)


def compiles(run: Callable[[Session], object]) -> list[list[str]]:
    """The lists of names that `run` had to compile."""
    session = Session()
    run(session)
    return session.compiles
