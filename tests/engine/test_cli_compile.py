"""`paged-kv compile` from end to end: what it makes is found by `generate`, which then compiles nothing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from paged_kv.cli import _run
from paged_kv.commands import compile as compile_module
from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target
from paged_kv.runtime.graph_reading import UnknownGraph

STEP = ("--dtype", "bfloat16", "--cache-dtype", "int4", "--cache-rotation", "hadamard")
"""No other test has this step, so no cache folder does."""
COMPILING = "compiling the decode step"


def generate(folder, *args):
    """Return what a process of its own says on stdout and stderr."""
    command = [sys.executable, "-c", "from paged_kv.cli import main; main()", "generate", "--model", folder]
    command += ["--prompt", "Once upon a time", "--max-new-tokens", "8", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_step_that_was_compiled_ahead_is_found(folder, tmp_path, capsys):
    target = choose_cpu_target(CpuInfo.read())
    targets = () if target is None else ("--target", target)
    assert _run(["compile", str(folder), "--out", str(tmp_path / "ahead"), *STEP, *targets]) == 0
    out, _ = capsys.readouterr()
    (file,) = (tmp_path / "ahead").iterdir()
    assert out == f"ready{f' for {target}' if target else ''}: {file}\n"
    for size in ("16", "5"):  # any page size
        ahead = ("--compiled", tmp_path / "ahead", "--page-size", size)
        text, messages = generate(folder, *ahead, *STEP)
        assert text
        assert COMPILING not in messages


def test_the_libraries_of_a_step_are_built_ahead(folder, capsys):
    for dtype in ("float32", "bfloat16"):
        assert _run(["compile", str(folder), "--dtype", dtype]) == 0
        assert capsys.readouterr().out == "ready: 2 libraries of kernels\n"
        _, messages = generate(folder, "--dtype", dtype)
        assert COMPILING not in messages
        assert "building" not in messages


def test_a_step_that_is_no_program_is_left_to_max(folder, monkeypatch, capsys):
    from paged_kv.engine import step

    def unknown(*_):
        raise UnknownGraph("the operation MatmulOp")

    monkeypatch.setattr(step, "build_libraries", unknown)
    monkeypatch.setattr(step, "compile_checkpoint", lambda *_: "file")
    monkeypatch.setattr(compile_module, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    assert _run(["compile", str(folder)]) == 0
    out, messages = capsys.readouterr()
    assert out == "ready: file\n"
    assert "MAX compiles this step: the operation MatmulOp" in messages


def test_what_cannot_be_compiled_is_refused(folder, tmp_path, capsys):
    for arguments, words in (
        ([folder, "--target", "pentium"], "target must be one of"),
        ([tmp_path / "none"], "none"),
    ):
        assert _run(["compile", *map(str, arguments)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert words in error


def test_a_folder_that_is_missing_is_refused(folder, tmp_path, capsys):
    arguments = ["generate", "--model", str(folder), "--prompt", "a", "--compiled", str(tmp_path / "none")]
    assert _run(arguments) == 2
    assert "is no folder of compiled steps" in capsys.readouterr().err
