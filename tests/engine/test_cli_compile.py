"""`paged-kv compile` from end to end: what it makes is found by `generate`, which then compiles nothing."""

import subprocess
import sys

from paged_kv.cli import _run
from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target

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
