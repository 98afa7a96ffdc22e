"""`paged-kv compile` from end to end: what it makes is found by `generate`, which then compiles nothing."""

import subprocess
import sys

import pytest

from paged_kv.cli import _run
from paged_kv.engine import step
from paged_kv.runtime.graph_reading import UnknownGraph


def generate(folder, *args):
    """Return what a process of its own says on stdout and stderr."""
    command = [sys.executable, "-c", "from paged_kv.cli import main; main()", "generate", "--model", folder]
    command += ["--prompt", "Once upon a time", "--max-new-tokens", "8", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_libraries_of_a_step_are_built_ahead(folder, capsys):
    for dtype in ("float32", "bfloat16"):
        assert _run(["compile", str(folder), "--dtype", dtype]) == 0
        assert capsys.readouterr().out == "ready: 2 libraries of kernels\n"
        text, messages = generate(folder, "--dtype", dtype)
        assert text
        assert "compiling" not in messages
        assert "building" not in messages


def test_a_step_that_is_no_program_is_left_to_max(folder, monkeypatch, capsys):
    def unknown(_):
        raise UnknownGraph("the operation MatmulOp")

    monkeypatch.setattr(step.StepGraph, "kernels", unknown)
    monkeypatch.setattr(step, "compile_ahead", lambda *_: ["a file"])
    assert _run(["compile", str(folder)]) == 0
    assert capsys.readouterr().out == "ready: a file\n"


def test_what_cannot_be_compiled_is_refused(tmp_path, capsys):
    assert _run(["compile", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "none" in error
