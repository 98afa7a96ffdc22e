"""What a compiled graph depends on, as one digest: the name of its artefact on disk.

The digest covers

* the versions of max and mojo, the CPU target in force and, on a GPU, its architecture and number;
* what the caller says of the graph: dtypes, sizes, configuration;
* the Python module that builds the graph, and those of this package that it imports, transitively;
* the files of registered ops, and the rooms of Mojo sources that the graph's ops reach by imports on that kind of
  device.

A room is a folder. Both lists are read from the imports in the sources, so no list here can be forgotten. Where they
cannot tell (an import that leads nowhere), the graph depends on every room.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from max.driver import get_virtual_cpu_target

from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cpu_target import CpuInfo

ROOT = "paged_kv"
UNRELATED = frozenset({"paged_kv", "paged_kv.arguments", "paged_kv.errors"})
"""Modules that put nothing into a graph: the table of public names, checks of arguments, and the exceptions."""

OTHER_DEVICE = {"cpu": frozenset({"gpu"}), "gpu": frozenset({"cpu", "layers", "linear"})}
"""Folders that registered ops import for the other kind of device; `layers` and `linear` are the CPU's."""

_OPS = "*ops.mojo"
"""The files at the top of `mojo_root` that register ops."""
_REGISTRATION = re.compile(r'@extensibility\.register\("(\w+)"\)')
_IMPORT = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]*))", re.MULTILINE)
_PLAIN_IMPORT = re.compile(r"^[ \t]*import[ \t]+([\w., \t]+)", re.MULTILINE)
_DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")
_WORD = re.compile(r"\w+")


class Key(Protocol):
    """What a graph depends on."""

    def digest(self, sources: Sources, toolchain: str) -> str:
        """32 hexadecimal digits, different where anything that the graph depends on differs."""


@dataclass(frozen=True)
class CompileKey:
    """One graph, as its builder knows it."""

    facts: str
    """Dtypes, sizes, configuration: all that the caller gives the builder."""
    builder: str
    """The module that builds the graph, by its full name."""
    ops: tuple[str, ...] | None = None
    """The registered ops in the graph; None where any of them may be."""
    device: str = ""
    """A GPU's API, architecture and number; empty for the CPU."""

    def digest(self, sources: Sources, toolchain: str) -> str:
        """32 hexadecimal digits, different where anything that the graph depends on differs."""
        digest = hashlib.sha256()
        parts = [toolchain, self.device, self.facts, *sources.python(self.builder)]
        parts += sources.mojo("gpu" if self.device else "cpu", self.ops)
        for part in parts:
            data = part.encode()
            digest.update(b"%d\n" % len(data))  # no two lists of parts may read the same
            digest.update(data)
        return digest.hexdigest()[:32]


def toolchain(target: str | None = None) -> str:
    """The versions of the compilers, and the CPU that they compile for: `target`, or the one in force."""
    target = target or get_virtual_cpu_target()
    if not target:  # MAX chooses by itself, from what this CPU says
        cpu = CpuInfo.read()
        target = f"chosen by MAX on {cpu.machine} {cpu.model_name} {' '.join(sorted(cpu.flags))}"
    return f"max {version('max')} mojo {version('mojo')} for {target}"


@dataclass(frozen=True)
class MojoImport:
    """`from ..cache.checks import check_equal`: two dots, `cache.checks`, and the names."""

    level: int
    module: str
    names: tuple[str, ...]
    """The names as they are used, after `as` where there is one."""
    origins: tuple[str, ...]
    """The names as they are defined."""


@dataclass(frozen=True)
class Sources:
    """The source files of this package. Each file is read once: make a new one after a change.

    Args:
        mojo_root: The folder of `ops.mojo` and of other files that register ops.
        packages: The folder of each Python package whose folder does not follow from its parent's, by name.
    """

    mojo_root: Path
    packages: Mapping[str, Path]
    _texts: dict[Path, str] = field(default_factory=dict, repr=False, compare=False)
    _modules: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)
    _reached: dict[tuple[str, tuple[str, ...] | None], list[str]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def installed(cls) -> Sources:
        """Those of the package that is running."""
        graphs = f"{ROOT}.graphs"
        return cls(kernels(), {name: Path(str(files(name))) for name in (ROOT, graphs)})

    def python(self, builder: str) -> list[str]:
        """The name and the text of a module, and of every module of this package that it imports, transitively."""
        if builder in self._modules:
            return self._modules[builder]
        texts: dict[str, str] = {}
        pending = [builder]
        while pending:
            module = pending.pop()
            if module in UNRELATED or module in texts:
                continue
            texts[module] = self._read(self._file_of(module))
            pending += self._python_imports(module, texts[module])
        found = self._modules[builder] = [part for module in sorted(texts) for part in (module, texts[module])]
        return found

    def mojo(self, device: str, ops: Iterable[str] | None) -> list[str]:
        """The name and the text of every file in the rooms that `ops` (None: any) reach on a "cpu" or a "gpu"."""
        asked = device, None if ops is None else tuple(sorted(ops))
        if asked not in self._reached:
            self._reached[asked] = [
                part
                for room in sorted(self.rooms(*asked))
                for file in sorted(room.glob("*.mojo"))
                for part in (file.relative_to(self.mojo_root).as_posix(), self._read(file))
            ]
        return self._reached[asked]

    def rooms(self, device: str, ops: Iterable[str] | None) -> set[Path]:
        """The folders that hold a file which `ops` reach by imports, that of the registered ops among them."""
        roots = sorted(self.mojo_root.glob(_OPS))
        texts = [self._read(root) for root in roots]
        known = {op for text in texts for op in _split(text)[1]}
        ops = None if ops is None or not known.issuperset(ops) else ops  # an op that is not found may be anything
        used = {root: _used_by(text, ops) for root, text in zip(roots, texts, strict=True)}
        reached: set[Path] = set()
        pending = [*roots]
        while pending:
            file = pending.pop()
            if file in reached:
                continue
            reached.add(file)
            for statement in _mojo_imports(self._read(file)):
                if file in used and (not used[file](statement) or _is_for_the_other(device, statement)):
                    continue
                found = self._resolve(file, statement)
                if not found:
                    return {path.parent for path in self.mojo_root.rglob("*.mojo")}
                pending += found
        return {file.parent for file in reached}

    def _resolve(self, file: Path, statement: MojoImport) -> list[Path]:
        """The files behind an import, those of the packages on the way included; empty where it leads nowhere."""
        base = file.parent
        for _ in range(statement.level - 1):
            base = base.parent
        if not base.is_relative_to(self.mojo_root):
            return []
        target = base.joinpath(*filter(None, statement.module.split(".")))
        found = [target.with_suffix(".mojo")] if statement.module else []
        if target.is_dir():
            found += [target / "__init__.mojo"]
            for name in statement.origins:
                found += [target / f"{name}.mojo", target / name / "__init__.mojo"]
        found = [path for path in found if path.is_file()]
        if found:
            package = target
            while package != self.mojo_root:
                package = package.parent
                found.append(package / "__init__.mojo")
        return [path for path in found if path.is_file()]

    def _python_imports(self, module: str, text: str) -> Iterator[str]:
        """The modules of this package that a module imports, anywhere in it; of a package, its `__init__`."""
        for dots, base, listed in _statements(text):
            if dots:
                is_package = self._file_of(module).name == "__init__.py"
                above = [*_ancestors(module)][len(dots) - is_package]
                base = f"{above}.{base}".rstrip(".")
            if base.partition(".")[0] != ROOT:
                continue
            inner = [f"{base}.{origin}" for origin, _ in _names(listed)]
            modules = [name for name in inner if self._file_of(name).is_file()]
            yield from modules
            if (len(modules) < len(inner) or not inner) and self._file_of(base).is_file():
                yield base
        for names in _PLAIN_IMPORT.findall(text):
            inner = [name for name in names.replace(",", " ").split() if name.partition(".")[0] == ROOT]
            yield from (name for name in inner if self._file_of(name).is_file())

    def _file_of(self, module: str) -> Path:
        """The file of a module of this package, whether it is there or not."""
        package = next(name for name in _ancestors(module) if name in self.packages)
        path = self.packages[package].joinpath(*filter(None, module[len(package) :].split(".")))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _read(self, file: Path) -> str:
        if file not in self._texts:
            self._texts[file] = file.read_text(encoding="utf-8")
        return self._texts[file]


def _ancestors(module: str) -> Iterator[str]:
    """The module and the packages around it, the innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _mojo_imports(text: str) -> Iterator[MojoImport]:
    """The relative imports of a file."""
    for dots, module, listed in _statements(text):
        if dots:
            pairs = _names(listed)
            yield MojoImport(len(dots), module, tuple(name for _, name in pairs), tuple(origin for origin, _ in pairs))


def _statements(text: str) -> Iterator[tuple[str, str, str]]:
    """The dots, the module and the names of each `from ... import ...` of Python or Mojo."""
    for dots, module, several, one in _IMPORT.findall(_COMMENT.sub("", text)):
        yield dots, module, several or one


def _names(listed: str) -> list[tuple[str, str]]:
    """Of a list of imported names, each as it is defined and as it is used: `a, b as c` is (a, a), (b, c)."""
    items = (_WORD.findall(item) for item in listed.split(","))
    return [(words[0], words[-1]) for words in items if words]


def _used_by(text: str, ops: Iterable[str] | None) -> Callable[[MojoImport], bool]:
    """Whether an import of a file with ops, whose text is given, serves one of these ops, or what is no op's own."""
    if ops is None:
        return lambda _: True
    shared, blocks = _split(text)
    words: set[str] = set(_WORD.findall(shared))
    for op in ops:
        words |= set(_WORD.findall(blocks.get(op, "")))
    return partial(_names_one_of, words)


def _names_one_of(words: set[str], statement: MojoImport) -> bool:
    return not statement.names or not words.isdisjoint(statement.names)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The text of each registered op by its name, and all the rest, both without imports and docstrings.

    An op's text goes from its registration to the next line that starts a statement of its own.
    """
    shared: list[str] = []
    blocks: dict[str, list[str]] = {}
    block = shared
    opened = False  # whether the struct of the registration is still to come
    for line in _DOCSTRING.sub("", _IMPORT.sub("", text)).splitlines():
        if match := _REGISTRATION.match(line):
            block, opened = blocks.setdefault(match[1], []), True
        elif opened and line.startswith("struct "):
            opened = False
        elif line[:1].strip() and not opened and line[0] not in ")]}":
            block = shared
        block.append(line)
    return "\n".join(shared), {op: "\n".join(lines) for op, lines in blocks.items()}


def _is_for_the_other(device: str, statement: MojoImport) -> bool:
    return not OTHER_DEVICE[device].isdisjoint(statement.module.split("."))
