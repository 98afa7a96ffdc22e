"""Nothing in this folder compiles: neither MAX nor the Mojo compiler is reached."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from max.engine import InferenceSession
from max.graph import KernelLibrary


def refuse(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("tests/unit compiles nothing: a test that needs a compiler belongs in another folder")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a graph, parsing the Mojo package for one, and starting `mojo` fail the test."""
    for name in ("compile", "compile_async", "compile_reusing_mefs", "load", "load_all"):
        monkeypatch.setattr(InferenceSession, name, refuse)
    load_paths, start = KernelLibrary.load_paths, subprocess.Popen.__init__

    def load_nothing(self: KernelLibrary, paths: Iterable[Path]) -> None:
        paths = list(paths)
        if paths:
            refuse()
        load_paths(self, paths)

    def start_unless_mojo(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        program = args if isinstance(args, str | Path) else args[0]
        if Path(str(program)).name.split(" ")[0] == "mojo":
            refuse()
        start(self, args, *rest, **options)

    monkeypatch.setattr(KernelLibrary, "load_paths", load_nothing)
    monkeypatch.setattr(subprocess.Popen, "__init__", start_unless_mojo)
