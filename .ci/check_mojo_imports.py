"""The rules of which folder of mojo_ops may know which, checked over the imports of every Mojo file.

    ops, attention_ops, layer_ops, linear_ops, latent_ops -> transfer, attention, layers, linear
    recurrent_ops -> recurrent -> layers
    transfer, attention, layers, linear -> cache -> isa

Folders of one kind of device are known to the ops alone, so those for a CPU and for a GPU do not know each other. In no
folder do files and subfolders import in a circle. Exit status 1 where an import breaks a rule.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "mojo_ops"

BASE = frozenset({"cache", "isa"})
MIDDLE = frozenset({"transfer", "attention", "layers", "linear"})
MAY_KNOW: dict[str, frozenset[str]] = {
    "ops": MIDDLE | BASE,
    "layer_ops": MIDDLE | BASE,
    "linear_ops": MIDDLE | BASE,
    "attention_ops": MIDDLE | BASE,
    "latent_ops": MIDDLE | BASE,
    "recurrent_ops": frozenset({"recurrent"}) | BASE,
    "recurrent": frozenset({"layers"}) | BASE,
    **dict.fromkeys(MIDDLE, BASE),
    "cache": frozenset({"isa"}),
    "isa": frozenset(),
}
"""The folders that each folder, or file at the top of mojo_ops, may import besides itself."""
OF_A_DEVICE = (frozenset({"gpu"}), frozenset({"cpu", "layers", "linear", "recurrent"}))
"""Folders of one kind of device, which only they and the registered ops know: a compiled graph for the other kind is
kept under a key that they are not in (runtime/compile_key.py)."""

IMPORT = re.compile(r"^[ \t]*from[ \t]+(\.+)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
ABSOLUTE = re.compile(r"^[ \t]*(?:from|import)[ \t]+mojo_ops\b", re.MULTILINE)

Module = tuple[str, ...]
"""A file by its path without the suffix: `("attention", "cpu", "dispatch")`. A folder stands for its `__init__`."""


def imports_of(file: Path) -> Iterator[tuple[int, Module]]:
    """Line and target of each relative import.

    Raises:
        ValueError: a target does not exist.
    """
    text = file.read_text()
    for match in IMPORT.finditer(text):
        dots, dotted, names = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        folder = file.parents[len(dots) - 1].joinpath(*filter(None, dotted.split(".")))
        if folder.with_suffix(".mojo").is_file():
            yield line, module_of(folder)
        elif folder.is_dir():  # its names are files, folders, or come from its __init__
            for name in re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", names):
                inner = folder / name
                yield line, module_of(inner if inner.is_dir() or inner.with_suffix(".mojo").is_file() else folder)
        else:
            raise ValueError(f"{file.relative_to(ROOT.parent)}:{line}: no file {folder.relative_to(ROOT.parent)}.mojo")


def module_of(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts and parts[-1] == "__init__" else parts


def broken_rule(importer: Module, imported: Module) -> str | None:
    folder, other = importer[0], imported[0] if imported else "mojo_ops"
    if folder != other and other not in MAY_KNOW.get(folder, frozenset()):
        return f"{folder} may not know {other}"
    for folders in OF_A_DEVICE:
        if not folder.endswith("ops") and folders.isdisjoint(importer) and not folders.isdisjoint(imported):
            return f"{'/'.join(importer[:2])} may not know {'/'.join(imported[:2])}"
    return None


def circles(edges: dict[tuple[Module, Module], str]) -> Iterator[str]:
    """For each folder, a circle of imports among its files and subfolders."""
    levels: dict[Module, dict[Module, set[Module]]] = {}
    for importer, imported in edges:
        shared = sum(1 for _ in common(importer, imported))
        if shared < min(len(importer), len(imported)):
            known = levels.setdefault(importer[:shared], {})
            known.setdefault(importer[: shared + 1], set()).add(imported[: shared + 1])
    for known in levels.values():
        try:
            TopologicalSorter(known).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # each imports the next
            yield "circle: " + " -> ".join("/".join(unit) for unit in circle)
            for unit, after in pairwise(circle):
                yield from (f"  {at}" for (a, b), at in edges.items() if inside(a, unit) and inside(b, after))


def common(one: Module, other: Module) -> Iterator[str]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def inside(module: Module, unit: Module) -> bool:
    return module[: len(unit)] == unit


def main() -> int:
    faults, edges, files = [], {}, sorted(ROOT.rglob("*.mojo"))
    for file in files:
        importer, shown = module_of(file), file.relative_to(ROOT.parent)
        if not importer:
            continue
        if importer[0] not in MAY_KNOW:
            faults.append(f"{shown}: the folder {importer[0]} has no line in {Path(__file__).name}")
        if ABSOLUTE.search(file.read_text()):
            faults.append(f"{shown}: imports mojo_ops by its name, which MAX does not know: write a relative import")
        try:
            for line, imported in imports_of(file):
                edges[importer, imported] = f"{shown}:{line}"
                if fault := broken_rule(importer, imported):
                    faults.append(f"{shown}:{line}: {fault}")
        except ValueError as error:
            faults.append(str(error))
    faults += circles(edges)
    print("\n".join(faults) or f"{len(files)} files, {len(edges)} imports, no rule broken")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
