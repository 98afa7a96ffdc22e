"""The file of each module of `paged_kv`: its packages lie in several folders, and pyproject.toml maps them."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def package_folders() -> dict[str, Path]:
    """Each package that is installed, and its folder below `ROOT`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots: dict[str, str] = settings["package-dir"]
    folders = {}
    for package in settings["packages"]:
        # The longest mapped package of which this is a part.
        root = max((root for root in roots if f"{package}.".startswith(f"{root}.")), key=len)
        folders[package] = Path(roots[root], *package.removeprefix(root).split("."))
    return folders


def modules() -> Iterator[tuple[str, Path]]:
    """Each module, and its file below `ROOT`."""
    for package, folder in package_folders().items():
        for file in sorted((ROOT / folder).glob("*.py")):
            name = package if file.stem == "__init__" else f"{package}.{file.stem}"
            yield name, file.relative_to(ROOT)


def benchmarks() -> Iterator[tuple[str, Path]]:
    """The same of `benchmarks`, which is not installed."""
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        path = file.relative_to(ROOT)
        yield ".".join(path.with_suffix("").parts).removesuffix(".__init__"), path


def lay_out(folder: Path) -> None:
    """Copies every module into `folder` as it is installed, for programs that find packages by their folders."""
    for name, path in modules():
        target = folder.joinpath(*name.split("."))
        target = target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
