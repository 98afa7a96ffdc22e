"""Processes that are started before and after calls of their parent: right, and never a hang."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("decode_variants")  # on disk, for the programs

PROGRAM = Path(__file__).parent / "forking.py"
SECONDS = 300
"""The time of one program, which takes two to seven. A child without MAX's threads would wait for ever."""

RIGHT = "128.0"


def printed(when: str, *hows: str) -> str:
    command = [sys.executable, str(PROGRAM), when, *hows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["fresh", "planned", "ran", "operated"])
def test_children_that_are_forked_compute(when):
    """After calls on several threads they do so on one: those of OpenMP, or of this package's team, are not in them."""
    hows = "os.fork", "exit", "fork", "loader", "operator"
    assert dict(zip(hows, printed(when, *hows).splitlines(), strict=True)) == dict.fromkeys(hows, RIGHT)


@pytest.mark.slow
def test_max_is_refused_in_a_child_that_is_forked_after_it_has_started():
    said = printed("started", "session")
    assert said.startswith("ToolchainError: this process was forked after MAX had started its threads")
    assert "'spawn' or 'forkserver'" in said
    assert printed("fresh", "session") == "InferenceSession"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_child_that_is_no_copy_computes(how):
    assert printed("ran", how) == RIGHT


@pytest.mark.slow
def test_pages_and_plans_work_in_any_child():
    assert printed("ran", "pure") == "3 pages, True"
