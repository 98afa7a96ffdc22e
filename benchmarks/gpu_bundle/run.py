"""Runs steps on the host, each in a process of its own under its own time limit. Needs Python alone.

    python3 run.py [--device gpu] [--results DIR] [--seconds 560] [--only NAMES] PART...

A row for each step goes to `DIR/rows.jsonl` the moment it ends, and a row for each line of its output that is a JSON
object the moment it is printed; all output goes to `DIR/log.txt`. A step that fails, hangs or is not there does not
stop the next one. `--seconds` is the time of all steps: a step that finds none left is written down as not started.
The exit status is 1 where a step did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HERE = Path(__file__).absolute().parent
ADVICE = "To get more accurate error information"
"""So begin lines of MAX after those that say what is wrong."""
WIDTH = 400
"""Characters of a row's detail."""


@dataclass(frozen=True)
class Step:
    """One check."""

    name: str
    part: str
    command: tuple[str, ...]
    seconds: float
    """Its time limit."""
    devices: tuple[str, ...] = ("gpu",)
    """Devices that it runs on."""
    env: tuple[tuple[str, str], ...] = ()


class Rows:
    """The file of rows: one JSON object a line, on the disk when `add` returns."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self._facts = path, facts
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **self._facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_step(step: Step, rows: Rows, log: BinaryIO, *, limit: float, env: Mapping[str, str]) -> str:
    """Runs one step for at most `limit` seconds, and writes its rows.

    Returns:
        What became of it: "passed", "failed", "timeout", or "missing" where its program is not there.
    """
    started = time.monotonic()
    log.write(f"=== {step.name}: {' '.join(step.command)}\n".encode())
    log.flush()
    try:
        process = subprocess.Popen(
            step.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**env, **dict(step.env)},
            start_new_session=True,
        )
    except OSError as error:
        detail = f"{step.command[0]}: {error.strerror}"
        log.write(f"{detail}\n".encode())
        rows.add(step=step.name, part=step.part, status="missing", seconds=0.0, detail=detail)
        return "missing"
    last = [""]
    reader = threading.Thread(target=_follow, args=(process.stdout, step, rows, log, last), daemon=True)
    reader.start()
    try:
        status = "passed" if process.wait(limit) == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "timeout"
    # What it started, and may have left running, ends with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    reader.join(5)  # the pipe may be held by a process that left the group
    if not reader.is_alive() and process.stdout is not None:
        process.stdout.close()
    seconds = round(time.monotonic() - started, 2)
    detail = last[0] if status != "timeout" else f"ended after {limit:.0f} s, after the line: {last[0]}"
    rows.add(step=step.name, part=step.part, status=status, seconds=seconds, exit=code, detail=detail[:WIDTH])
    return status


def emit(**facts: Any) -> None:
    """Prints a row of the results, from within a step."""
    print(json.dumps(facts), flush=True)


def _follow(output: BinaryIO, step: Step, rows: Rows, log: BinaryIO, last: list[str]) -> None:
    for line in output:
        log.write(line)
        log.flush()
        text = line.decode(errors="replace").strip()
        if not text:
            continue
        found = _json_object(text)
        if found is None:
            if not text.startswith(ADVICE):
                last[0] = text
        else:
            rows.add(step=step.name, part=step.part, **found)


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and not {"step", "part"} & set(found) else None


def run_steps(steps: Sequence[Step], rows: Rows, log: BinaryIO, *, seconds: float, env: Mapping[str, str]) -> bool:
    """Run steps one after the other; True if all of them passed."""
    end, passed = time.monotonic() + seconds, True
    for step in steps:
        left = end - time.monotonic()
        if left < min(5.0, step.seconds):
            rows.add(step=step.name, part=step.part, status="not started", seconds=0.0, detail="no time was left")
            status = "not started"
        else:
            status = run_step(step, rows, log, limit=min(step.seconds, left), env=env)
        print(f"{status:<12} {step.name}", flush=True)
        passed &= status == "passed"
    return passed


def environment(home: Path) -> dict[str, str]:
    """Return what every step is given: the bundle's own packages, its artefacts as the cache, its programs'
    libraries.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(home / "site"), str(home / "tests")])
    env["XDG_CACHE_HOME"] = str(home / "cache")
    # The driver's libraries (libcuda, libnvidia-ml) may be mounted where the loader does not look.
    mounted = [folder for folder in ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib") if Path(folder).is_dir()]
    # MAX's matrix products of float32 are cuBLAS's, which torch has brought.
    torchs = map(str, Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/lib"))
    libraries = [str(home / "site/modular/lib"), env.get("LD_LIBRARY_PATH"), *mounted, *torchs]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    env["PYTHONSAFEPATH"] = "1"  # the bundle's `benchmarks`, not those of a checkout that the steps are started in
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
    # MAX takes 90 % of a GPU's memory with its first context; torch and other systems want room beside it.
    env.setdefault("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "10")
    ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    if Path(ptxas).is_file():  # MAX's own assembler is not in the bundle
        env.setdefault("MODULAR_NVPTX_COMPILER_PATH", ptxas)
    return env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="first, correct, speed; all of them by default")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--only", default="", help="names of steps, with commas")
    arguments = parser.parse_args()
    listed = json.loads((HERE / "steps.json").read_text())
    results = arguments.results.absolute()
    words = {"python": os.environ.get("PYTHON", sys.executable), "home": str(HERE), "device": arguments.device}
    words["results"] = str(results)
    only = set(filter(None, arguments.only.split(",")))
    steps = []
    for fields in listed["steps"]:
        command = tuple(word.format(**words) for word in fields["command"])
        step = Step(
            fields["name"],
            fields["part"],
            command,
            fields["seconds"],
            tuple(fields["devices"]),
            tuple(fields["env"].items()),
        )
        chosen = step.name in only if only else not arguments.parts or step.part in arguments.parts
        if chosen and arguments.device in step.devices:
            steps.append(step)
    if not steps:
        print(f"no step of {arguments.parts or sorted(only)} for the {arguments.device}")
        return 2
    rows = Rows(results / "rows.jsonl", {"device": arguments.device, "commit": listed["commit"]})
    with (results / "log.txt").open("ab") as log:
        passed = run_steps(steps, rows, log, seconds=arguments.seconds, env=environment(HERE))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
