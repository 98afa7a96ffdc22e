"""How many threads the ops run on, on the CPU: MAX's pool of threads, and what decides its size.

MAX starts the pool with the first device of a process, a thread a CPU that the process may run on, and keeps it. The
ops, MAX's and ours, cut their work for its size. Its own argument for that (`InferenceSession(num_threads=)`, 26.7)
ends the process, since a device that exists has another number. So the process's CPUs are fewer while the pool starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_kv.arguments import integer
from paged_kv.errors import ContractError, ToolchainError

_TASKS = Path("/proc/self/task")
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
_POOL_NAME = "🔥 Thread"
_SETTLE_SECONDS = 0.02
"""Threads give themselves their names a moment after they start."""


def allowed_cpus() -> set[int]:
    """The CPUs that this process may run on: its affinity mask, where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


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
    """The threads of MAX's pool; 0 before it has started, None where the system does not list threads."""
    if not _TASKS.is_dir():
        return None
    return len(_pool_tasks())


def started_pool_threads() -> int | None:
    """The threads of MAX's pool, which is started where it was not."""
    # Not at the top: `doctor` reads this module where MAX is not installed.
    from max.driver import CPU

    CPU()
    return _settled(pool_threads)


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
        raise ContractError(f"num_threads is {count}, this process may run on {len(cpus)} CPUs")
    if pool_threads() is None or not hasattr(os, "sched_setaffinity"):
        raise ToolchainError("num_threads can be set on Linux only")
    running = _settled(pool_threads) if _pool_may_run() else 0
    if not running:
        running = _start_pool(count, cpus)
        if running != count:
            raise ToolchainError(f"MAX started {running} threads on {count} CPUs; a quota may allow no more")
    if running != count:
        raise ContractError(
            f"num_threads is {count}, but MAX runs on {running} threads already; set it before any call"
        )


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


def _pool_may_run() -> bool:
    return len(list(_TASKS.iterdir())) > 1


def _pool_tasks() -> list[str]:
    names = []
    for task in _TASKS.iterdir():
        try:
            names.append((task / "comm").read_text(encoding="utf-8", errors="replace"))
        except OSError:  # it has ended
            continue
    return [name for name in names if name.startswith(_POOL_NAME)]


def _settled(count: Callable[[], Any]) -> Any:
    """What `count` says twice in a row."""
    last = count()
    for _ in range(50):
        time.sleep(_SETTLE_SECONDS)
        now = count()
        if now == last:
            break
        last = now
    return last
