"""Whether MAX's server can run in this environment."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from paged_kv.errors import ToolchainError

COMPILED_BY_MAX = "max._kv_cache_ops"
"""MAX compiles it where it is first imported, and writes the library in place.

What it loads sets two variables for the processes that this one starts, which `os.environ` does not show: PYTHONPATH,
and PYTHONEXECUTABLE to the `python3` that PATH has first.
"""


def check_environment() -> None:
    """Refuses an environment in which MAX's server would fail after a while, with many lines.

    Raises:
        ToolchainError: a dependency of `max[serve]` is missing, or has the wrong version.
    """
    try:
        wrong = list(_mismatches(metadata.requires("max") or ()))
    except ImportError:
        wrong = ["packaging is missing"]
    if wrong:
        listed = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ToolchainError(
            f"MAX's server cannot run in this environment: {listed}; make a new one and"
            " `pip install 'paged-kv[serve]'` there (the `test` extra wants another transformers)"
        )


def import_alone(name: str = COMPILED_BY_MAX) -> None:
    """Imports a package of MAX's in one process at a time: of two that start at once in a new environment, the second
    would load a library of which the first has written half.

    Raises:
        ToolchainError: it cannot be loaded.
    """
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return  # another version of MAX, which has no such package
    try:
        with _held(Path(spec.origin).parent):
            import_module(name)
    except ImportError as error:
        raise ToolchainError(
            f"MAX cannot load a library that it compiles for itself: {error}; where it names a file, remove that file"
            " (a process that was killed leaves it half written), and start again"
        ) from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """While no other process holds this folder; without a word where the system cannot lock one."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _mismatches(requirements: Iterable[str]) -> Iterator[str]:
    """The dependencies of MAX's server that are missing or have the wrong version, in words."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "serve"}):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} is {installed}, it must be {requirement.specifier}"
