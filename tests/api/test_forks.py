"""Processes that are started before and after MAX runs in their parent: right, or one error at once; never a hang."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("decode_variants")  # on disk, for the programs

PROGRAM = Path(__file__).parents[1] / "support" / "forking.py"
SECONDS = 300
"""Of one program, which takes two to four. A child without MAX's threads would wait for ever."""

REFUSED = "ToolchainError: this process was forked after MAX had started its threads"
RIGHT = "128.0"


def printed(when: str, how: str) -> str:
    command = [sys.executable, str(PROGRAM), when, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["os.fork", "exit", "fork", "loader", "operator"])
def test_a_child_that_is_forked_before_anything_ran(how):
    assert printed("fresh", how) == RIGHT


@pytest.mark.parametrize("how", ["os.fork", "exit", "fork", "loader"])
def test_a_child_that_is_forked_after_a_run(how):
    said = printed("ran", how)
    assert said.startswith(REFUSED)
    assert "'spawn' or 'forkserver'" in said
    assert "\n" not in said


@pytest.mark.parametrize("when", ["ran", "operated"])
def test_the_torch_operators_work_in_a_child_that_is_forked_after_a_run(when):
    """They run on one thread there: OpenMP's are not in the child either."""
    assert printed(when, "operator") == RIGHT


def test_a_child_that_is_forked_after_a_plan():
    """`plan` makes MAX's first device, which starts its threads."""
    assert printed("planned", "os.fork").startswith(REFUSED)


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_what_the_error_names_works(how):
    assert printed("ran", how) == RIGHT


def test_pages_and_plans_work_in_any_child():
    assert printed("ran", "pure") == "3 pages, True"
