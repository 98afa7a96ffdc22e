"""Generated hostile calls: each gives the right answer, or a typed error of one line and nothing written.

    pytest tests/hostile --hostile-seed 7 --hostile-cases 5000

A case is named by its seed and number; `python -m hostile.child SEED NUMBER NUMBER+1 LOG`, in tests/, runs it alone.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
START_SECONDS = 1200.0
"""For a process to import its libraries and load the ops, compiled where the disk has them not."""
CASE_SECONDS = 600.0
"""For one case, whose variant may have to be compiled on a machine that has other work."""
BATCH = 1250
"""Cases of one process, at most."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cases" in metafunc.fixturenames:
        seed, count = metafunc.config.getoption("--hostile-seed"), metafunc.config.getoption("--hostile-cases")
        batches = [(seed, first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
        metafunc.parametrize("cases", batches, ids=lambda batch: f"seed {batch[0]}, {batch[1]} to {batch[2]}")


@pytest.mark.slow
def test_hostile_calls_are_right_or_refused(cases: tuple[int, int, int], tmp_path: Path) -> None:
    wrong, counts = run(*cases, tmp_path / "log")
    assert not wrong, "\n".join(["", *wrong])
    total = cases[2] - cases[1]
    assert sum(counts.values()) == total
    if total >= 100:  # what is refused throughout, or never, tests nothing
        assert min(counts["right"], counts["refused"]) > total / 5


def run(seed: int, first: int, last: int, log: Path) -> tuple[list[str], Counter[str]]:
    """Return what is wrong with the cases from `first` to `last`, and how many were "right" and "refused".

    They run in as many processes as they bring down.
    """
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    while first < last:
        log.write_text("")
        process = subprocess.Popen(
            [sys.executable, "-m", "hostile.child", str(seed), str(first), str(last), str(log)],
            cwd=TESTS,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        hung = not ended(process, log)
        if hung:
            process.kill()
        said = process.communicate(timeout=300)[1]
        records = [json.loads(line) for line in log.read_text().splitlines()]
        counts.update(record["was"] for record in records if "was" in record)
        wrong += [f"seed {seed}, case {r['number']}: {r['wrong']}" for r in records if "wrong" in r]
        if not hung and process.returncode == 0:
            return wrong, counts
        number: Any = records[-1]["number"] if records else None
        how = "hangs" if hung else f"ends the process with status {process.returncode}"
        wrong.append(f"seed {seed}, case {number}: {records and records[-1]['said']}: {how}: {said[-1000:]}")
        if number is None:
            return wrong, counts
        first = number + 1
    return wrong, counts


def ended(process: subprocess.Popen[str], log: Path) -> bool:
    """Waits for a process that writes to its log; False: it wrote nothing for too long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = log.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > (CASE_SECONDS if size > 200 else START_SECONDS):
            return False
    return True
