"""Words for the last lines of a test run: the compiles that it waited for, since people wait for little else.

Processes that tests start compile too, and are not counted.
"""

import resource
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from max.engine import InferenceSession

from paged_kv.runtime import kernel_library, libraries

KINDS = ("libraries of kernels", "programs of MAX", "packages of Mojo sources")
_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}


def install() -> None:
    """Notes what this process compiles from now on."""
    patch = pytest.MonkeyPatch()  # for as long as the process lives
    for owner, name, kind, of_children in (
        (libraries, "_build", KINDS[0], True),
        (InferenceSession, "compile", KINDS[1], False),
        (kernel_library, "subprocess_run_mojo", KINDS[2], True),
    ):
        patch.setattr(owner, name, _noted(getattr(owner, name), kind, of_children))


def _noted(compile_it: Callable[..., Any], kind: str, of_children: bool) -> Callable[..., Any]:
    def compiling(*arguments: Any, **options: Any) -> Any:
        with _noting(kind, resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF):
            return compile_it(*arguments, **options)

    return compiling


@contextmanager
def _noting(kind: str, who: int):
    before, began = resource.getrusage(who), time.monotonic()
    yield
    if time.monotonic() - began > 1:  # MAX finds what it has compiled before in a moment
        after = resource.getrusage(who)
        _seconds[kind].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def noted() -> dict[str, list[float]]:
    """CPU seconds of each compile of this process, by kind."""
    return _seconds


def in_words(of_processes: list[dict[str, list[float]]]) -> str:
    """Return all of them in a line."""
    parts = []
    for kind in KINDS:
        seconds = [each for of_one in of_processes for each in of_one[kind]]
        if seconds:
            parts.append(f"{len(seconds)} {kind} in {sum(seconds):.0f} CPU s")
    return "compiled: " + (", ".join(parts) or "nothing")
