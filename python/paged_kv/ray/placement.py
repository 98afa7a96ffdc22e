"""The CPUs that a replica runs on: no CPU twice, whole cores first, of one NUMA node where that has enough.

Ray counts CPUs as Linux does, two where a core runs two threads (SMT), and binds nothing. Processes of one machine
agree by locks on files, one for each CPU, whichever raylet or cluster started them, as long as they see the same folder
of temporary files; the system drops a process's locks when it ends, SIGKILL included.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_kv.arguments import integer
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.numa import SYSTEM, bind_threads, numbers_of


@dataclass(frozen=True)
class Core:
    """A physical core, or a part that is free or claimed: its CPUs, as Linux numbers them, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True)
class Claim:
    """CPUs that this process alone has, among those that claim some. It ends with the process, or by `release`."""

    cores: tuple[Core, ...]
    _locks: tuple[int, ...]

    @property
    def cpus(self) -> frozenset[int]:
        """All of them."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def threads(self) -> int:
        """The number of threads that compute: one a core, however many of its CPUs were claimed."""
        return len(self.cores)

    def bind(self) -> None:
        """Lets all threads of this process run on these CPUs alone; those that they start later too.

        Call it before the weights are loaded: memory then lies in the node of these CPUs.
        """
        bind_threads(self.cpus)

    def release(self) -> None:
        """Gives the CPUs back."""
        for lock in self._locks:
            os.close(lock)


def claim(
    cpus: int, *, seconds: float = 60.0, folder: Path | None = None, cores: Sequence[Core] | None = None
) -> Claim:
    """Takes `cpus` free CPUs, all of one NUMA node where one has so many; of cores of which no CPU is taken first.

    Args:
        cpus: As Ray's `num_cpus`: of a core that is two CPUs, 1 takes one, and another replica may take the other.
        seconds: How long to wait for a replica that is ending.
        folder: The folder of the locks; one of this user's where None.
        cores: The machine's, where None; of these, a process uses what its affinity mask allows.

    Raises:
        ContractTypeError, ContractError: `cpus` is no positive integer, or more than the machine has; its CPUs stay
            taken.
        ToolchainError: the folder of the locks belongs to somebody else.
    """
    cpus = integer("cpus", cpus, 1)
    cores = machine() if cores is None else cores
    total = _count(cores)
    if cpus > total:
        raise ContractError(f"cpus: expected at most {total}, the CPUs of this process, got {cpus}")
    folder = _folder() if folder is None else folder
    end = time.monotonic() + seconds
    while True:
        with _Turn(folder):
            claimed = _take(cpus, cores, folder)
        if claimed is not None:
            return claimed
        if time.monotonic() > end:
            raise ContractError(f"cpus: for {seconds:.0f} s fewer than {cpus} of {total} CPUs were free of replicas")
        time.sleep(0.1)


def machine(allowed: Iterable[int] | None = None, system: Path = SYSTEM) -> list[Core]:
    """The cores that this process may use, by node. A core of which a CPU is not allowed counts with the others."""
    left = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = []
    while left:
        listed = numbers_of(system / "cpu" / f"cpu{left[0]}" / "topology" / "thread_siblings_list") or [left[0]]
        mine = tuple(cpu for cpu in listed if cpu in left) or (left[0],)
        cores.append(Core(mine, _node(mine[0], system)))
        left = [cpu for cpu in left if cpu not in mine]
    return sorted(cores, key=lambda core: (core.node, core.cpus))


def _take(cpus: int, cores: Sequence[Core], folder: Path) -> Claim | None:
    locks = {cpu: lock for core in cores for cpu in core.cpus if (lock := _lock(folder, cpu)) is not None}
    free = [Core(tuple(cpu for cpu in core.cpus if cpu in locks), core.node) for core in cores]
    chosen = _choose(cpus, [core for core in free if core.cpus])
    claimed = {cpu for core in chosen for cpu in core.cpus}
    for cpu, lock in locks.items():
        if cpu not in claimed:
            os.close(lock)
    return Claim(tuple(chosen), tuple(locks[cpu] for cpu in sorted(claimed))) if chosen else None


def _choose(cpus: int, free: Sequence[Core]) -> list[Core]:
    """CPUs of the node that is left with the fewest, of those that have enough; else of several; none if too few."""
    nodes = [[core for core in free if core.node == node] for node in sorted({core.node for core in free})]
    fitting = [mine for mine in nodes if _count(mine) >= cpus]
    chosen: list[Core] = []
    for core in sorted(min(fitting, key=_count) if fitting else free, key=lambda core: -len(core.cpus)):
        if (missing := cpus - _count(chosen)) > 0:
            chosen.append(Core(core.cpus[:missing], core.node))
    return chosen if _count(chosen) == cpus else []


def _count(cores: Iterable[Core]) -> int:
    return sum(len(core.cpus) for core in cores)


class _Turn:
    """One process at a time looks for CPUs: two that each hold half of what both want would wait for ever."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "turn"

    def __enter__(self) -> None:
        self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def _lock(folder: Path, cpu: int) -> int | None:
    lock = os.open(folder / f"cpu-{cpu}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"paged-kv-cpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ToolchainError(f"{folder}: belongs to somebody else")
    return folder


def _node(cpu: int, system: Path) -> int:
    for folder in sorted((system / "node").glob("node[0-9]*")):
        if cpu in numbers_of(folder / "cpulist"):
            return int(folder.name.removeprefix("node"))
    return 0
