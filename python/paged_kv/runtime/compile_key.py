"""Everything a compiled graph depends on, as one digest: the name of its artefact on disk.

The digest covers

* the versions of max and mojo, the CPU target in force and, on a GPU, its architecture and number;
* what the caller says of the graph: dtypes, sizes, configuration;
* the Python that builds it: `kv_formats.py`, `options.py`, the files of `graphs`, and what `built_by` names;
* the Mojo files, but for folders of the other kind of device.

Whole folders count, and no file is parsed: a change may compile a graph again that it does not touch, and misses none
that it does (docs/notes/compile-time.md has the costs). That the lists are complete is kept by
tests/unit/test_compile_key.py for Python's imports and by .ci/check_mojo_imports.py for Mojo's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from max.driver import get_virtual_cpu_target

from paged_kv.errors import ToolchainError
from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cpu_target import CpuInfo

PYTHON = ("call_layouts.py", "kv_formats.py", "options.py", "graphs/*.py")
"""Files that every graph is built with."""
MOJO = "mojo_ops/**/*.mojo"
MODELS = "graphs/models/*.py"
"""Files that a model's step is built with besides."""
OTHER_DEVICE = {"cpu": frozenset({"gpu"}), "gpu": frozenset({"cpu", "layers", "linear", "recurrent"})}
"""Folders of Mojo for the other kind of device; `layers`, `linear` and `recurrent` are the CPU's."""

OF_SOME_LIBRARIES = {"gpu": frozenset({"gpu"}), "layers": frozenset({"layers", "recurrent"})}
OF_SOME_LIBRARIES["recurrent"] = frozenset({"recurrent"})
"""Folders of Mojo that only libraries have whose programs name one of these folders; the ops, which lie beside the
folders, are in none.
"""


Named = TypeVar("Named")


class Key(Protocol):
    """Everything a graph depends on."""

    def digest(self, sources: Sources, toolchain: str) -> str:
        """32 hexadecimal digits, different where anything that the graph depends on differs."""


@dataclass(frozen=True)
class CompileKey:
    """One graph, as its builder knows it."""

    facts: str
    """Dtypes, sizes, configuration: all that the caller gives the builder."""
    built_by: tuple[str, ...] = ()
    """Files that build the graph, besides `PYTHON`: `MODELS`, `max_serve/graph.py`."""
    device: str = ""
    """A GPU's API, architecture and number; empty for the CPU."""

    def digest(self, sources: Sources, toolchain: str) -> str:
        """32 hexadecimal digits, different where anything that the graph depends on differs."""
        read = sources.digest("gpu" if self.device else "cpu", self.built_by)
        return hash_of(part.encode() for part in (toolchain, self.device, self.facts, read))


@dataclass(frozen=True)
class LibraryKey:
    """A library of kernels, which no Python builds and no op of MAX is part of."""

    facts: str
    program: str
    """The Mojo file in `runtime` that it is built from."""
    folders: frozenset[str]
    """The folders of `mojo_ops` that its part of the file names."""

    def has(self, file: PurePosixPath) -> bool:
        """Return whether a Mojo file is a part of it."""
        needed = [OF_SOME_LIBRARIES[part] for part in file.parts if part in OF_SOME_LIBRARIES]
        return len(file.parts) > 2 and not any(self.folders.isdisjoint(each) for each in needed)

    def digest(self, sources: Sources, toolchain: str) -> str:
        """32 hexadecimal digits, different where anything that the library depends on differs."""
        read = sources.read(f"runtime/{self.program}") + [item for item in sources.read(MOJO) if self.has(item[0])]
        return hash_of((toolchain.encode(), self.facts.encode(), *_parts(read)))


@dataclass(frozen=True)
class Sources:
    """The source files of this package, each read once: make a new one after a change.

    Args:
        folders: The package's under "", and those of `graphs` and `mojo_ops`, which a checkout has elsewhere.
    """

    folders: Mapping[str, Path]
    _digests: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict, repr=False, compare=False)
    _read: dict[str, list[tuple[PurePosixPath, bytes]]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def installed(cls) -> Sources:
        """Those of the package that is running."""
        package, graphs = (Path(str(files(name))) for name in ("paged_kv", "paged_kv.graphs"))
        return cls({"": package, "graphs": graphs, "mojo_ops": kernels()})

    def digest(self, device: str, built_by: tuple[str, ...]) -> str:
        """Return the digest of the files that a graph for a "cpu" or a "gpu" is made of."""
        asked = device, built_by
        if asked not in self._digests:
            python = [item for pattern in (*PYTHON, *built_by) for item in self.read(pattern)]
            mojo = [item for item in self.read(MOJO) if OTHER_DEVICE[device].isdisjoint(item[0].parts)]
            self._digests[asked] = hash_of(_parts([*python, *mojo]))
        return self._digests[asked]

    def read(self, pattern: str) -> list[tuple[PurePosixPath, bytes]]:
        """The names and the contents of a pattern's files. Raises as `files`."""
        if pattern not in self._read:
            self._read[pattern] = [(name, file.read_bytes()) for name, file in self.files(pattern)]
        return self._read[pattern]

    def files(self, pattern: str) -> list[tuple[PurePosixPath, Path]]:
        """The files of a pattern, each by its name in the installed package.

        Raises:
            ToolchainError: there is none.
        """
        folder_name, _, inner = pattern.partition("/")
        if folder_name not in self.folders:
            folder_name, inner = "", pattern
        folder = self.folders[folder_name]
        sources = [(PurePosixPath(folder_name, file.relative_to(folder)), file) for file in sorted(folder.glob(inner))]
        if not sources:
            raise ToolchainError(f"{folder / inner} is missing; reinstall paged-kv")
        return sources


def toolchain(target: str | None = None) -> str:
    """The versions of the compilers, and the CPU that they compile for: `target`, or the one in force."""
    target = target or get_virtual_cpu_target()
    if not target:  # MAX chooses by itself, from what this CPU says
        cpu = CpuInfo.read()
        target = f"chosen by MAX on {cpu.machine} {cpu.model_name} {' '.join(sorted(cpu.flags))}"
    return f"max {version('max')} mojo {version('mojo')} for {target}"


def digests_of(keys: Mapping[Named, Key], sources: Sources, target: str | None = None) -> dict[Named, str]:
    """The name of each key's artefact, for a CPU target (None: the one in force)."""
    tools = toolchain(target)
    return {name: key.digest(sources, tools) for name, key in keys.items()}


def _parts(read: Sequence[tuple[PurePosixPath, bytes]]) -> Iterator[bytes]:
    return (part for name, content in read for part in (str(name).encode(), content))


def hash_of(parts: Iterable[bytes]) -> str:
    """32 hexadecimal digits of a list of parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d\n" % len(part))  # no two lists of parts may read the same
        digest.update(part)
    return digest.hexdigest()[:32]
