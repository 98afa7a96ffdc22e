"""The threads of a call of a library of kernels, as `Workers` (`mojo_ops/isa/threads.mojo`) has them.

They are OpenMP's where the process has one that all of it sees, as torch brings: a call then runs on the threads that
torch's own ops run on, and no two pools spin on the same cores. Else they are a team of this package's
(`mojo_ops/isa/team.mojo`), which starts with the first call that wants more than one thread, and sleeps between calls.

In a process that was forked off one with threads, these are missing, and to wait for them would never end: there a call
runs on the thread that makes it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from threading import Lock

from paged_kv.call_layouts import WORKERS
from paged_kv.runtime.threads import chosen_threads, num_threads

(_WORKERS,) = WORKERS.parts("count team state")
_ALONE = _WORKERS.pack(1, 0, 0)
_TASKS = Path("/proc/self/task")


class _Team:
    """The threads of this process."""

    def __init__(self) -> None:
        self.lost_threads = self._has_threads = False
        self._lock = Lock()
        self._openmp: int | None = None
        self._own: tuple[int | None, bytes] | None = None
        self._started: tuple[int, int] | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        try:
            self._has_threads = len(os.listdir(_TASKS)) > 1
        except OSError:  # where threads are not listed: there may be some
            self._has_threads = True

    def _in_child(self) -> None:
        self.lost_threads |= self._has_threads
        self._lock = Lock()  # a thread that the child lacks may hold the other one

    def workers(self) -> bytes:
        if self.lost_threads:
            return _ALONE
        torch = sys.modules.get("torch")
        if self._openmp is None and hasattr(torch, "get_num_threads"):
            self._openmp = _openmp()
        if self._openmp and torch is not None:
            count = torch.get_num_threads()
            return _ALONE if count == 1 else _WORKERS.pack(count, self._openmp, 0)
        own = self._own
        if own is None or own[0] != chosen_threads():
            with self._lock:
                own = self._own = chosen_threads(), self._packed()
        return own[1]

    def _packed(self) -> bytes:
        """`Workers` of this package's team, which is started where there is none."""
        count = num_threads()
        if count == 1:
            return _ALONE
        if self._started is None:
            self._started = _start(count - 1)
        return _WORKERS.pack(count, *self._started)


def workers() -> bytes:
    """`Workers` for a loaded library: torch's number of threads where its OpenMP is there, else `num_threads`."""
    return _TEAM.workers()


def may_use_threads() -> bool:
    """Return whether a call may run on more than the thread that makes it."""
    return not _TEAM.lost_threads


def _openmp() -> int:
    """The address of `GOMP_parallel`, 0 where the process sees none."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _start(threads: int) -> tuple[int, int]:
    """A team of so many threads beside the caller's: the address of its function, and its state."""
    process = ctypes.CDLL(None)  # where all see the libraries of kernels, each of which has a team's functions
    start = process.paged_kv_team_start
    start.argtypes, start.restype = [ctypes.c_int64], ctypes.c_int64
    return ctypes.cast(process.paged_kv_team_run, ctypes.c_void_p).value or 0, start(threads)


_TEAM = _Team()
