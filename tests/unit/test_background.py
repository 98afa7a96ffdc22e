"""Jobs that run beside the tests: once, in the background or in the test that needs the result first."""

import sys
import threading

import pytest

from support import background
from support.background import Job


def test_a_job_runs_once():
    ran = []
    job = Job(lambda: ran.append(threading.current_thread().name) or len(ran))
    assert [job(), job()] == [1, 1]
    assert ran == [threading.current_thread().name]


def test_a_failure_is_raised_wherever_the_result_is_asked_for():
    def fail():
        raise AssertionError("no such kernel")

    job = Job(fail)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no such kernel"):
            job()


def test_a_job_that_waits_in_the_queue_is_done_by_who_asks(monkeypatch):
    monkeypatch.setattr(background, "_POOL", background.ThreadPoolExecutor(1))
    release, begun = threading.Event(), threading.Event()
    first = Job(lambda: begun.set() or release.wait(120))
    second = Job(lambda: threading.current_thread().name)
    first.start()
    second.start()
    assert begun.wait(120)
    assert second() == threading.current_thread().name
    release.set()
    assert first() is True


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(background.subprocess.TimeoutExpired):
        background.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.5)
    done = background.run([sys.executable, "-c", "print(7); raise SystemExit(3)"], timeout=300)
    assert (done.returncode, done.stdout) == (3, "7\n")
