"""Whether MAX's pool runs: its threads give themselves their names after they start, when a CPU is free for them."""

import os
import threading
import time
from pathlib import Path

import pytest

from paged_kv.runtime import threads

NAMED = "🔥 Thread0"


def stat(folder: Path, thread: int, name: str, state: str = "S", ticks: int = 0, age: float = 10) -> None:
    """Writes what Linux says of a thread (proc(5)): fields 3, 14, 15 and 22."""
    start = int((time.clock_gettime(time.CLOCK_BOOTTIME) - age) * os.sysconf("SC_CLK_TCK"))
    fields = [state, *["0"] * 10, str(ticks), "0", *["0"] * 6, str(start), "0"]
    (folder / str(thread)).mkdir(exist_ok=True)
    written = folder / str(thread) / "new"
    written.write_text(f"{thread} ({name}) {' '.join(fields)}\n", encoding="utf-8")
    written.replace(written.with_name("stat"))


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A process of one thread, with MAX imported and nothing of it started."""
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setattr(threads, "_MAX_MODULE", "sys")
    stat(tmp_path, os.getpid(), "python", state="R")
    return tmp_path


def later(seconds: float, folder: Path, thread: int, name: str) -> None:
    threading.Timer(seconds, stat, (folder, thread, name), {"ticks": 1}).start()


@pytest.mark.usefixtures("tasks")
def test_without_threads_it_does_not_run():
    assert threads.pool_threads() == 0
    assert threads.pool_has_started() is False


@pytest.mark.parametrize(
    ("state", "age", "seconds"),
    [("S", 0.01, 0.02), ("R", 0.8, 0.2), ("D", 0.8, 0.2)],
    ids=["young", "starved", "paging"],
)
def test_a_thread_without_its_name_is_waited_for(tasks, state, age, seconds):
    stat(tasks, 1, "python", state=state, age=age)
    later(seconds, tasks, 1, NAMED)
    assert threads.pool_has_started() is True
    assert threads.pool_threads() == 1


def test_all_threads_are_counted(tasks):
    stat(tasks, 1, NAMED)
    stat(tasks, 2, "python", state="R", age=0.5)
    start = time.monotonic()
    assert threads.pool_has_started() is True  # one is enough to know
    assert time.monotonic() - start < threads._SETTLE_SECONDS / 2
    later(0.1, tasks, 2, "🔥 Thread1")
    assert threads.pool_threads() == 2


@pytest.mark.parametrize("other", [{"state": "S"}, {"state": "R", "ticks": 3}], ids=["waits", "works"])
def test_threads_of_others_are_not_waited_for(tasks, other):
    stat(tasks, 1, "a) R 1 (b", **other)
    start = time.monotonic()
    assert threads.pool_has_started() is False
    assert threads.pool_threads() == 0
    assert time.monotonic() - start < threads._SETTLE_SECONDS / 2


def test_a_thread_that_never_runs_ends_the_wait(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_SETTLE_SECONDS", 0.1)
    stat(tasks, 1, "python", state="R")
    assert threads.pool_has_started() is False


def test_without_max_nothing_is_read(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_MAX_MODULE", "no.such.module")
    stat(tasks, 1, NAMED)
    assert threads.pool_threads() == 0
    assert threads.pool_has_started() is False


def test_a_system_that_lists_no_threads(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_TASKS", tasks / "none")
    assert threads.pool_threads() is None
    assert threads.pool_has_started() is None
