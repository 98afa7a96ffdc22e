"""The store that comes with the package, read and never written: a folder for each CPU target.

    TARGET/index.json             digest of a graph's key -> its file; the target, versions, the SHA-256 of each file
    TARGET/BUNDLE.graph.xz        a compressed artefact of some graphs, sealed under their digests (`store.py`)
    TARGET/NAME.library.xz        a compressed library of kernels, sealed likewise

`python -m paged_kv.build_kernels` makes them. They lie in `paged_kv/kernels` or in a distribution of their own,
`paged-kv-kernels`, and are trusted as the package's code is: their owner is not checked. A damaged file is not read. A
digest has the sources, the versions of MAX and Mojo and the target in it, so what was compiled from other sources or
for another CPU has another one, and is not found.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paged_kv.files import open_regular, read_regular
from paged_kv.runtime.cpu_target import CpuInfo
from paged_kv.runtime.store import Artefact, read_sealed

FORMAT = 1
"""The version of the folder's format. Another one is not read."""
DISTRIBUTION = "paged_kv_kernels"
"""The package of the compiled graphs alone, for an installation from source."""
INDEX = "index.json"
LIBRARY = ".library.xz"

_FILE = re.compile(r"\w+\.(graph|library)\.xz")


@dataclass(frozen=True)
class Index:
    """The contents of a target's `index.json`."""

    target: str
    requires: frozenset[str]
    """The flags that a CPU must report."""
    versions: dict[str, str]
    """The versions of paged-kv, max and mojo."""
    graphs: dict[str, dict[str, str]]
    """By digest: the graph's `name` and its `file`."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: `bytes` and `sha256`."""

    def write(self, path: Path) -> None:
        """Writes it, the same bytes for the same content."""
        content = {**vars(self), "format": FORMAT, "requires": sorted(self.requires)}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Index:
        """From a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no index of this format.
        """
        try:
            content = json.loads(read_regular(path))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, not {FORMAT}")
            graphs = {str(digest): {**graph} for digest, graph in content["graphs"].items()}
            if not all(_FILE.fullmatch(graph["file"]) for graph in graphs.values()):
                raise ValueError("a file's name leads out of the folder")
            requires = frozenset(content["requires"])
            return cls(content["target"], requires, content["versions"], graphs, content["files"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no index: {error!r}") from error


class InstalledStore:
    """The compiled graphs of one CPU target, for a CPU that reports `cpu.flags`."""

    def __init__(self, path: Path, cpu: CpuInfo) -> None:
        self.path = path
        self._cpu = cpu

    def find(self, digests: Iterable[str]) -> list[Artefact]:
        """The whole files that hold graphs of these keys, each once; of a target that the CPU cannot run, none."""
        try:
            index = Index.read(self.path / INDEX)
        except (OSError, ValueError) as error:
            _warn(self.path / INDEX, error)
            return []
        by_file: dict[str, set[str]] = {}
        for digest in digests:
            if digest in index.graphs and index.requires <= self._cpu.flags:
                by_file.setdefault(index.graphs[digest]["file"], set()).add(digest)
        artefacts = []
        for name, asked in by_file.items():
            try:
                artefact = read_compressed(self.path / name)
                if not asked <= artefact.names:
                    raise ValueError("it holds other graphs")
            except (OSError, ValueError) as error:
                _warn(self.path / name, error)
                continue
            artefact.digests |= asked
            artefacts.append(artefact)
        return artefacts

    def remove(self, path: Path) -> None:
        """Says that MAX does not read a whole file. It stays: it is the installation's, not the user's."""
        _warn(path, ValueError("MAX refuses it"))


def read_compressed(path: Path) -> Artefact:
    """A whole file of a target's folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not whole.
    """
    with open_regular(path) as file:
        artefact = read_sealed(path, file)
    if artefact is None:
        raise ValueError("it is damaged")
    try:
        import lzma  # not at the top: some builds of Python lack it
    except ImportError as error:
        raise ValueError("this Python was built without lzma") from error
    try:
        artefact.content = lzma.decompress(artefact.content)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error
    return artefact


def kernel_roots() -> list[Path]:
    """The folders that may hold a folder for each target."""
    roots = [Path(str(files("paged_kv"))) / "kernels"]
    spec = find_spec(DISTRIBUTION)
    return roots + [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def installed_stores(targets: Sequence[str], cpu: CpuInfo) -> Iterator[tuple[str, InstalledStore]]:
    """Return what is installed for some targets, in their order, each with its target."""
    roots = kernel_roots() if targets else []
    for target in targets:
        for root in roots:
            if (root / target).is_dir():
                yield target, InstalledStore(root / target, cpu)


def _warn(path: Path, error: Exception) -> None:
    reason = " ".join(str(error).split())
    warnings.warn(f"{path} is not read ({reason}): reinstall it", RuntimeWarning, 2)
