"""The number of threads that the ops run on, on the CPU: MAX's pool of threads, and what decides its size.

MAX starts the pool with the first device of a process, a thread a CPU that the process may run on, and keeps it. The
ops, MAX's and ours, cut their work for its size. Its own argument for that (`InferenceSession(num_threads=)`, 26.7)
ends the process, since a device that exists has another number. So the process's CPUs are fewer while the pool starts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paged_kv.arguments import integer
from paged_kv.errors import ContractError, ToolchainError

_TASKS = Path("/proc/self/task")
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
_BYTES_OF_A_COMPILE = 2 << 30
_POOL_NAME = "🔥 Thread"
_MAX_MODULE = "max.driver"
"""Without it in the process nothing has started the pool."""
_YOUNG_SECONDS = 0.05
"""MAX's threads give themselves their names within this time of their start, if a CPU is free for them."""
_SETTLE_SECONDS = 2.0
"""No thread is waited for longer."""


def allowed_cpus() -> set[int]:
    """The CPUs that this process may run on: its affinity mask, where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def compiles_at_a_time() -> int:
    """One a core, as memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // _BYTES_OF_A_COMPILE))


def cgroup_quota(files: tuple[Path, Path] = _QUOTA) -> float | None:
    """CPUs that the control group grants, which may be a fraction; None where it sets no limit.

    Args:
        files: `cpu.max` of version 2, `cpu.cfs_quota_us` of version 1.
    """
    unified, quota = files
    try:
        if unified.exists():
            granted, period = unified.read_text().split()
        else:
            granted, period = quota.read_text(), quota.with_name("cpu.cfs_period_us").read_text()
        return None if granted == "max" or int(granted) <= 0 else int(granted) / int(period)
    except (OSError, ValueError):
        return None


def pool_threads() -> int | None:
    """The threads of MAX's pool; 0 before it has started, None where the system does not list threads.

    Threads that are too new to have a name are waited for.
    """
    if not _TASKS.is_dir():
        return None
    if _MAX_MODULE not in sys.modules:
        return 0
    return sum(task.is_of_pool for task in _settled(lambda tasks: not any(task.may_take_a_name for task in tasks)))


def pool_has_started() -> bool | None:
    """Return whether MAX's pool runs; None where the system does not list threads. Waits as `pool_threads`."""
    if not _TASKS.is_dir():
        return None
    if _MAX_MODULE not in sys.modules:
        return False

    def is_certain(tasks: list[_Task]) -> bool:
        return any(task.is_of_pool for task in tasks) or not any(task.may_take_a_name for task in tasks)

    return any(task.is_of_pool for task in _settled(is_certain))


def started_pool_threads() -> int | None:
    """The threads of MAX's pool, which is started where it was not."""
    # Not at the top: `doctor` reads this module where MAX is not installed.
    from max.driver import CPU

    CPU()
    return pool_threads()


_chosen: list[int] = []


def chosen_threads() -> int | None:
    """Return what `set_num_threads` said last."""
    return _chosen[-1] if _chosen else None


def num_threads() -> int:
    """Threads of a call: as many as `set_num_threads` said, else one for each CPU that the process may run on."""
    return _chosen[-1] if _chosen else len(allowed_cpus())


def set_num_threads(num_threads: int) -> None:
    """Makes the ops on the CPU run on `num_threads` threads in this process, MAX's own ops too.

    Call it before anything that uses MAX: the first call of an op, the first array of a MAX device. Results do not
    depend on the number.

    Args:
        num_threads: From 1 to the CPUs that the process may run on, which is the number that MAX takes by itself.

    Raises:
        ContractTypeError: it is no integer.
        ContractError: it is below 1, more than the CPUs, or MAX runs on another number of threads already.
        ToolchainError: the system has no affinity mask (only Linux has), or MAX starts another number of threads.
    """
    count = integer("num_threads", num_threads, 1)
    cpus = allowed_cpus()
    if count > len(cpus):
        raise ContractError(f"num_threads: expected 1 to {len(cpus)}, the CPUs of this process, got {count}")
    running = pool_threads()
    if running is None or not hasattr(os, "sched_setaffinity"):
        raise ToolchainError("num_threads: requires Linux")
    if not running:
        running = _start_pool(count, cpus)
        if running != count:
            raise ToolchainError(
                f"num_threads: expected MAX to start {count}, got {running}; a quota may allow no more"
            )
    if running != count:
        raise ContractError(
            f"num_threads: expected {running}, as MAX runs on so many already, got {count}: set it before any call"
        )
    _chosen.append(count)


def _start_pool(count: int, cpus: set[int]) -> int | None:
    before = {task.name for task in _TASKS.iterdir()}
    chosen = set(_one_a_core(sorted(cpus))[:count])
    os.sched_setaffinity(0, chosen)
    try:
        running = started_pool_threads()
    finally:
        os.sched_setaffinity(0, cpus)
    # New threads inherited the mask. Those that MAX has bound to a CPU of their own stay there.
    for task in _TASKS.iterdir():
        if task.name not in before and os.sched_getaffinity(int(task.name)) == chosen:
            os.sched_setaffinity(int(task.name), cpus)
    return running


def _one_a_core(cpus: list[int]) -> list[int]:
    """CPUs ordered so that the first are of different cores: a core may be several CPUs (SMT)."""

    def rank(cpu: int) -> int:
        try:
            siblings = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            return 0
        first = siblings.replace(",", "-").split("-")[0]
        return 0 if int(first) == cpu else 1

    return sorted(cpus, key=rank)


@dataclass(frozen=True)
class _Task:
    """A thread of this process, as the system describes it."""

    name: str
    state: str
    ticks: int
    """CPU time so far, in clock ticks."""
    age: float
    """Seconds since it started."""

    @staticmethod
    def of(folder: Path, now: float) -> _Task:
        name, _, rest = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        fields = rest.split()
        user, system, start = int(fields[11]), int(fields[12]), int(fields[19])
        return _Task(name.partition("(")[2], fields[0], user + system, now - start / os.sysconf("SC_CLK_TCK"))

    @property
    def is_of_pool(self) -> bool:
        return self.name.startswith(_POOL_NAME)

    @property
    def may_take_a_name(self) -> bool:
        """True if it has only just started, or waits for a CPU since it did."""
        return not self.is_of_pool and (self.age < _YOUNG_SECONDS or (self.state in "RD" and not self.ticks))


def _tasks() -> list[_Task]:
    tasks, now = [], time.clock_gettime(time.CLOCK_BOOTTIME)
    for folder in _TASKS.iterdir():
        if folder.name == str(os.getpid()):  # the first thread of all is none of the pool's
            continue
        with suppress(OSError):  # it has ended
            tasks.append(_Task.of(folder, now))
    return tasks


def _settled(is_certain: Callable[[list[_Task]], bool]) -> list[_Task]:
    """The threads of this process once they tell what is asked, or when they have been given time enough."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        tasks = _tasks()
        if is_certain(tasks) or time.monotonic() > end:
            return tasks
        time.sleep(0.001)
