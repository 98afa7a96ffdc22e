"""The steps of the bundle for a GPU host: each alone, and a row for each whatever becomes of it."""

import json
import os
import re
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_bundle import run, steps
from benchmarks.gpu_bundle.run import Rows, Step, run_steps
from support.limits import has_ended

ROOT = Path(__file__).parents[2]


SECONDS = 120.0
"""More than any step here takes that ends by itself."""
LAST_WORDS = b"and now it hangs"
HANGS = f"""
import time
print({LAST_WORDS.decode()!r}, flush=True)
time.sleep(600)
"""


def python(name, code, seconds=SECONDS, **fields):
    return Step(name, "first", (sys.executable, "-c", code), seconds, **fields)


@pytest.fixture(autouse=True)
def _time_begins_when_a_step_hangs(tmp_path, monkeypatch):
    """The time limit of a step that hangs counts from its last words: Python may take a while to start."""

    class Hanging(subprocess.Popen):
        def wait(self, timeout=None):
            log, end = tmp_path / "log.txt", time.monotonic() + SECONDS
            while HANGS in self.args[-1] and LAST_WORDS + b"\n" not in log.read_bytes() and time.monotonic() < end:
                time.sleep(0.01)
            return super().wait(timeout)

    # Of `run` alone, whose other names are those of the module.
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Hanging}))


@pytest.fixture
def ran(tmp_path):
    """Runs steps; their rows, whether all passed, and the log."""

    def go(*listed, seconds=10 * SECONDS):
        rows, log = Rows(tmp_path / "rows.jsonl", {"device": "gpu"}), tmp_path / "log.txt"
        with log.open("ab") as file:
            passed = run_steps(listed, rows, file, seconds=seconds, env=dict(os.environ))
        return [json.loads(line) for line in rows.path.read_text().splitlines()], passed, log.read_text()

    return go


def test_every_step_has_a_row_whatever_became_of_it(ran):
    rows, passed, log = ran(
        python("good", "print('all is well')"),
        python(
            "bad",
            "print('nothing is well'); print('To get more accurate error information, do that'); raise SystemExit(3)",
        ),
        Step("absent", "first", ("/nonexistent/program",), 5),
        python("slow", HANGS, seconds=0.5),
        python("last", "print('still here')"),
    )
    assert [(row["step"], row["status"]) for row in rows] == [
        *(("good", "passed"), ("bad", "failed"), ("absent", "missing"), ("slow", "timeout"), ("last", "passed"))
    ]
    assert [row.get("exit") for row in rows[:2]] == [0, 3]
    assert rows[0]["detail"] == "all is well"
    assert rows[1]["detail"] == "nothing is well"
    assert "/nonexistent/program" in rows[2]["detail"]
    assert rows[3]["detail"].endswith(LAST_WORDS.decode())
    assert 0.5 <= rows[3]["seconds"] < 600  # it was ended
    assert all(row["device"] == "gpu" for row in rows)
    assert not passed
    assert "nothing is well" in log


def test_what_a_step_prints_as_json_is_a_row_at_once(ran):
    code = """
print('{"us": 1.5}', flush=True)
print('{not json}', flush=True)
print('{"step": "another"}', flush=True)
"""
    rows, _, log = ran(python("measures", code + HANGS, seconds=0.1))
    assert rows[0] == {"step": "measures", "part": "first", "us": 1.5, "device": "gpu"}
    assert [row["status"] for row in rows[1:]] == ["timeout"]
    assert '{"us": 1.5}' in log


def test_rows_are_on_disk_while_a_step_runs(tmp_path):
    """A run that loses the machine in the middle of a step has all rows before it."""
    code = f"import time; print(open({str(tmp_path / 'rows.jsonl')!r}).read().count('passed')); time.sleep(0)"
    rows = Rows(tmp_path / "rows.jsonl", {})
    with (tmp_path / "log").open("ab") as log:
        run_steps([python("a", "print(1)"), python("b", code)], rows, log, seconds=10 * SECONDS, env=dict(os.environ))
    found = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert found[1]["detail"] == "1"


def test_what_a_step_leaves_running_ends_with_it(ran, tmp_path):
    left = tmp_path / "left"
    child = f"import os, time; open({str(left)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    code = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.DEVNULL)
left = pathlib.Path({str(left)!r})
while not left.exists() or not left.read_text().endswith("\\n"):
    time.sleep(0.01)
"""
    rows, _, _ = ran(python("leaves", code))
    assert rows[0]["status"] == "passed"
    assert has_ended(int(left.read_text()))


@pytest.mark.slow
def test_a_step_without_time_left_is_written_down(ran, monkeypatch):
    # At the start of all, before the first step, at its start; then it has taken 1.25 s.
    times = chain([0.0] * 3, repeat(1.25))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(times)))
    slow, following = python("slow", HANGS, 1.0), python("next", "print(1)", 1.0)
    rows, passed, _ = ran(slow, following, seconds=1.5)
    assert [row["status"] for row in rows] == ["timeout", "not started"]
    assert rows[0]["seconds"] == 1.25
    assert not passed


def test_the_steps_are_there_and_fit_their_calls():
    names = [step.name for step in steps.STEPS]
    assert len(set(names)) == len(names)
    for step in steps.STEPS:
        assert step.part in ("first", "correct", "speed")
        for word in step.command:
            if word.startswith("{home}/tests/") and not word.endswith(".ini"):
                assert (ROOT / word.removeprefix("{home}/")).is_file()
            if word.startswith("{home}/programs/"):
                assert word.removeprefix("{home}/programs/") in steps.PROGRAMS
            assert set(re.findall(r"\{(.*?)\}", word)) <= {"python", "home", "device", "results"}
    for source in steps.PROGRAMS.values():
        assert (ROOT / "tests" / "mojo" / source).is_file()
    for part in ("first", "correct"):
        assert sum(step.seconds for step in steps.STEPS if step.part == part) <= 600
    assert max(step.seconds for step in steps.STEPS) < 600


def test_the_runner_reads_what_the_bundle_writes(tmp_path):
    """With `--device cpu`, only steps for the CPU run; here their Python is a program that says its arguments."""
    (tmp_path / "run.py").write_text(Path(run.__file__).read_text())
    (tmp_path / "steps.json").write_text(steps.as_json("abc"))
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$*"\n')
    script.chmod(0o755)
    command = [sys.executable, tmp_path / "run.py", "first", "--device", "cpu", "--results", tmp_path / "results"]
    result = subprocess.run(
        command, env={**os.environ, "PYTHON": str(script)}, capture_output=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout
    rows = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    expected = [step.name for step in steps.STEPS if step.part == "first" and "cpu" in step.devices]
    assert [row["step"] for row in rows] == expected
    assert all((row["commit"], row["device"]) == ("abc", "cpu") for row in rows)
    assert rows[0]["detail"].endswith("--device cpu names")


def test_the_hosts_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", raising=False)
    env = run.environment(tmp_path)
    assert env["MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"] == "10"
    assert env["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "site")


@pytest.mark.slow
def test_each_test_of_a_step_is_a_row(ran, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "def test_good(): print('{\"us\": 1}')\n\ndef test_bad(): assert 1 == 2\n\ndef test_broken(no_fixture): pass\n"
    )
    plugins = ("-p", "no:cacheprovider", "-p", "benchmarks.gpu_bundle.pytest_rows")
    command = (sys.executable, "-m", "pytest", "-v", "-n0", *plugins, "-c", str(tmp_path / "pytest.ini"), str(tmp_path))
    *rows, whole = ran(Step("tests", "correct", command, SECONDS))[0]
    found = [(row["test"].partition("::")[2], row["outcome"]) for row in rows]
    assert found == [("test_good", "passed"), ("test_bad", "failed"), ("test_broken", "failed")]
    assert "assert 1 == 2" in rows[1]["reason"]
    assert "fixture" in rows[2]["reason"]
    assert whole["status"] == "failed"
    assert "1 failed" in whole["detail"]
