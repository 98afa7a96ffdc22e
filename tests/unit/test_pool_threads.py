"""MAX's pool runs or not: its threads name themselves after they start, when a CPU is free for them."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paged_kv.runtime import threads

NAMED = "🔥 Thread0"
NOW = 1000.0
"""Seconds since the machine was started."""


class Clock:
    """In place of `time`: the clock goes on only while somebody sleeps, and then what is due happens."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.waited = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.waited

    def clock_gettime(self, clock: int) -> float:
        assert clock == self.CLOCK_BOOTTIME
        return NOW + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        for event in [event for event in self._due if event[0] <= self.waited]:
            self._due.remove(event)
            event[1]()

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        self._due.append((self.waited + seconds, happens))


def stat(folder: Path, thread: int, name: str, state: str = "S", ticks: int = 0, age: float = 10) -> None:
    """Writes what Linux says of a thread (proc(5)): fields 3, 14, 15 and 22."""
    start = int((NOW - age) * os.sysconf("SC_CLK_TCK"))
    fields = [state, *["0"] * 10, str(ticks), "0", *["0"] * 6, str(start), "0"]
    (folder / str(thread)).mkdir(exist_ok=True)
    written = folder / str(thread) / "new"
    written.write_text(f"{thread} ({name}) {' '.join(fields)}\n", encoding="utf-8")
    written.replace(written.with_name("stat"))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(threads, "time", clock)
    return clock


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A process of one thread, with MAX imported and nothing of it started."""
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setattr(threads, "_MAX_MODULE", "sys")
    stat(tmp_path, os.getpid(), "python", state="R")
    return tmp_path


@pytest.mark.usefixtures("tasks")
def test_without_threads_it_does_not_run(clock):
    assert threads.pool_threads() == 0
    assert threads.pool_has_started() is False
    assert clock.waited == 0


@pytest.mark.parametrize(
    ("state", "age", "seconds"),
    [("S", 0.01, 0.02), ("R", 0.8, 0.2), ("D", 0.8, 1.9)],
    ids=["young", "starved", "paging"],
)
def test_a_thread_without_its_name_is_waited_for(tasks, clock, state, age, seconds):
    stat(tasks, 1, "python", state=state, age=age)
    clock.later(seconds, lambda: stat(tasks, 1, NAMED, ticks=1))
    assert threads.pool_has_started() is True
    assert clock.waited == pytest.approx(seconds, abs=0.002)
    assert threads.pool_threads() == 1


def test_all_threads_are_counted(tasks, clock):
    stat(tasks, 1, NAMED)
    stat(tasks, 2, "python", state="R", age=0.5)
    assert threads.pool_has_started() is True  # one is enough to know
    assert clock.waited == 0
    clock.later(0.1, lambda: stat(tasks, 2, "🔥 Thread1", ticks=1))
    assert threads.pool_threads() == 2


@pytest.mark.parametrize(
    "other", [{"state": "S"}, {"state": "S", "age": 0.06}, {"state": "R", "ticks": 3}], ids=["old", "late", "works"]
)
def test_threads_of_others_are_not_waited_for(tasks, clock, other):
    stat(tasks, 1, "a) R 1 (b", **other)
    assert threads.pool_has_started() is False
    assert threads.pool_threads() == 0
    assert clock.waited == 0


def test_a_thread_that_never_runs_ends_the_wait(tasks, clock):
    stat(tasks, 1, "python", state="R")
    assert threads.pool_has_started() is False
    assert clock.waited == pytest.approx(threads._SETTLE_SECONDS, abs=0.002)


def test_without_max_nothing_is_read(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_MAX_MODULE", "no.such.module")
    stat(tasks, 1, NAMED)
    assert threads.pool_threads() == 0
    assert threads.pool_has_started() is False


def test_a_system_that_lists_no_threads(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_TASKS", tasks / "none")
    assert threads.pool_threads() is None
    assert threads.pool_has_started() is None
