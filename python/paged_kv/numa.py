"""The places of threads and memory on a machine with several NUMA nodes.

Linux puts a page of memory on the node of the thread that writes it first. One thread reads a server's weights, so all
of them would lie on one node, and all threads would share its memory. The next idle thread takes the next part of a
call wherever its memory lies, so threads that stay with their memory are those of a process a node. A process over
several nodes reads from all of their memories at once where pages lie on all of them by turns.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ToolchainError

INTERLEAVE = "interleave"
SYSTEM = Path("/sys/devices/system")
_TASKS = Path("/proc/self/task")
_STATUS = Path("/proc/self/status")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED, _INTERLEAVED = 1, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Placement:
    """The memory policy of a process, and its CPUs."""

    mode: int
    """Linux's number of the policy."""
    nodes: tuple[int, ...]
    """The nodes that memory comes from."""
    cpus: frozenset[int] | None = None
    """The CPUs that threads may run on; None: as before."""


def set_numa(where: str) -> None:
    """Places this process: threads and memory on one node, or memory on all nodes by turns.

    Call it before anything that uses MAX, whose threads take over what the calling thread has, and before weights are
    read. Files that the system has in memory already stay where they are. Results do not depend on it.

    Args:
        where: The number of a node, whose CPUs the process runs on and whose memory it takes first; or `interleave`.

    Raises:
        ContractError: it is neither, the machine has no such node, or the process may not use it.
        ToolchainError: the system has no memory policy, or refuses it.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not _TASKS.is_dir():
        raise ToolchainError("NUMA nodes can be chosen on Linux, on x86-64 and ARM64 only")
    placement = place(where, nodes(SYSTEM), os.sched_getaffinity(0), _allowed_nodes())
    words = (ctypes.c_ulong * (max(placement.nodes) // _WORD_BITS + 1))()
    for node in placement.nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), placement.mode, words, ctypes.c_ulong(_WORD_BITS * len(words) + 1)):
        raise ToolchainError(f"the system refuses this memory policy: {os.strerror(ctypes.get_errno())}")
    if placement.cpus is not None:
        bind_threads(placement.cpus)


def place(where: str, cpus_of: Mapping[int, frozenset[int]], cpus: set[int], allowed: Iterable[int]) -> Placement:
    """Return what `set_numa` does.

    Args:
        where: As there.
        found: The CPUs of each node that has memory.
        cpus: The CPUs that the process may run on.
        allowed: The nodes whose memory it may take.
    """
    usable = sorted(cpus_of.keys() & set(allowed))
    if where == INTERLEAVE:
        if not usable:
            raise ContractError("this machine tells of no NUMA node whose memory the process may take")
        return Placement(_INTERLEAVED, tuple(usable))
    node = int(where) if where.isascii() and where.isdigit() else -1
    if node not in usable:
        raise ContractError(f"a NUMA node is one of {', '.join(map(str, usable))} or {INTERLEAVE}, not {shown(where)}")
    mine = cpus_of[node] & cpus
    if not mine:
        raise ContractError(f"this process may run on no CPU of NUMA node {node}")
    return Placement(_PREFERRED, (node,), mine)


def nodes(system: Path) -> dict[int, frozenset[int]]:
    """The CPUs of each node that has memory; node 0 with all CPUs where the system tells of none."""
    folder = system / "node"
    with_memory = numbers_of(folder / "has_memory")
    cpus_of = {node: frozenset(numbers_of(folder / f"node{node}" / "cpulist")) for node in with_memory}
    return cpus_of or {0: frozenset(range(os.cpu_count() or 1))}


def numbers_of(file: Path) -> list[int]:
    """The numbers of a list such as `0-3,8` in a file; none where it has something else, or is not there."""
    try:
        return _numbers(file.read_text())
    except OSError:
        return []


def _numbers(text: str) -> list[int]:
    try:
        ends = [part.partition("-") for part in text.strip().split(",") if part]
        return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]
    except ValueError:
        return []


def bind_threads(cpus: frozenset[int]) -> None:
    """Lets all threads of this process run on these CPUs alone; those that they start later too."""
    # A thread that starts while the others are listed has the mask of the one that started it: it is found in the
    # next turn, and the last turn found all bound.
    while sum(_bind(int(task.name), cpus) for task in _TASKS.iterdir()):
        pass


def _bind(task: int, cpus: frozenset[int]) -> bool:
    """Return whether a thread had to be bound."""
    try:
        if os.sched_getaffinity(task) <= cpus:
            return False
        os.sched_setaffinity(task, cpus)
    except ProcessLookupError:  # it has ended
        return False
    return True


def _allowed_nodes() -> list[int]:
    """The nodes whose memory this process may take."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                return _numbers(line.partition(":")[2])
    return [0]
