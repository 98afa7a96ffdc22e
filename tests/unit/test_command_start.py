"""Commands before they compute anything: interrupts during imports, and what `generate` refuses before a compile."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.cli import _run
from paged_kv.commands.prompts import RefusedLine, encode, read
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.requests import Sampling
from paged_kv.engine.tokenizer import Tokenizer

INTERRUPTED = """
import os, signal, sys
interrupted = sys.argv[1]
class Finder:
    def find_spec(self, name, *_):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from paged_kv.__main__ import main
sys.argv[:2] = ["paged-kv"]
main()
"""
GENERATE = ["generate", "--model", str(FOLDER)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("paged_kv.cli", ["--help"]),
        ("click", ["inspect", "missing"]),
        ("paged_kv.runtime.doctor", ["doctor"]),
        ("paged_kv.runtime.warmup", ["warmup"]),
        ("max.engine", [*GENERATE, "--prompt", "a"]),
        ("paged_kv.engine.step", ["compile", "missing"]),
        ("paged_kv.engine.tokenizer", ["demo"]),
    ],
)
def test_an_interrupt_during_an_import_is_no_traceback(module, command):
    program = [sys.executable, "-c", INTERRUPTED, module, *command]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("paged_kv.commands.generation.load_model", lambda *_: pytest.fail("it loads the model"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-step-tokens", "0"], "--max-step-tokens: expected at least 1, got 0"),
        (["--n", "257"], "--n: expected at most 256, got 257"),
        (["--trace", "missing/trace"], "--trace missing/trace: cannot be written"),
        (["--trace", "pipe"], "--trace pipe: cannot be written"),
    ],
)
def test_generate_refuses_before_it_loads(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert _run([*GENERATE, "--prompt", "Once", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_closed_stdin_and_a_pipe_are_refused(tmp_path, capsys):
    program = [sys.executable, "-m", "paged_kv", *GENERATE, "--input", "-"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, preexec_fn=lambda: os.close(0))
    assert (done.returncode, done.stderr) == (2, "error: --input -: stdin is closed\n")
    os.mkfifo(tmp_path / "pipe")
    assert _run([*GENERATE, "--input", str(tmp_path / "pipe")]) == 2
    assert _run(["inspect", str(tmp_path / "pipe")]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2


WRONG = ("3", [], {}, None, True, 1.5, "", -1, 10**400, [None], {"a": 1}, [[1]], [True])


@pytest.mark.parametrize(
    ("field", "fine"),
    [
        ("prompt", ["3", "", [], 0]),
        ("n", []),
        ("max_tokens", [10**400]),
        ("temperature", [1.5]),
        ("top_p", []),
        ("seed", [None, 10**400]),
        ("stop", ["3", [], ""]),
        ("stop_tokens", [[]]),
        ("ignore_end", [True]),
        ("namespace", ["3", "", None]),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, field, fine):
    config = load_config(FOLDER)
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps({"prompt": [1]} | {field: value}) + "\n" for value in WRONG))
    lines = encode(read(str(file), Sampling(), 1), Tokenizer(FOLDER, config), config)
    taken = [value for value, line in zip(WRONG, lines, strict=True) if not isinstance(line, RefusedLine)]
    assert all(any(value is each or value == each for each in fine) for value in taken), taken


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_floats_of_numpy_are_temperatures(kind):
    Sampling(temperature=kind(0.5), top_p=kind(0.5))
