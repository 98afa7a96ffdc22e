"""One job: a case, alone or beside one peer, in a process of its own.

    python -m paged_kv.bench.job RESULT.json CASE PEER|- REPEATS profile|- [CPU target]

A process each, so that memory is free afterwards, one system's threads do
not disturb another's, and a peer that crashes takes nothing with it. Ours, the bandwidth and the peer take turns, so
their ratios meet the same machine.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from max.driver import set_virtual_cpu_target

from paged_kv.bench.case_kinds import AppendCase, Case, named
from paged_kv.bench.cases import CASES, PEERS
from paged_kv.bench.other_work import CpuTimes, other_work
from paged_kv.bench.peer import Peer
from paged_kv.bench.problems import problem_of
from paged_kv.errors import ContractError

MIN_REPEATS = 9
PAUSE = 0.01
"""Seconds between turns: thread pools that spin after their work (vLLM's for 5 ms) would disturb the next system."""
PEER_SLACK = 5
"""The factor by which another system may be less exact than ours: some sum in bfloat16. The errors are in the
results.
"""
LONG = 1.0
"""Seconds of one round of turns from which `MIN_REPEATS` rounds must do."""
WARM = 0.03
"""Seconds of untimed runs before a timed one: a pause lets threads sleep and the clock fall. Longer runs need none."""


def take_turns(runs: dict[str, Callable[[int], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each run, in turns; each system's runs are numbered from 0 on.

    The first `warmup` turns do not count; one is enough where it takes seconds.
    """
    count = {name: itertools.count() for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + repeats):
        if turn == 1 and sum(taken[0] for taken in times.values()) > LONG:
            warmup, repeats = 1, MIN_REPEATS
        if turn == warmup + repeats:
            break
        for name, run in runs.items():
            time.sleep(PAUSE)
            warm = time.perf_counter() + WARM
            while times[name] and times[name][-1] < WARM and time.perf_counter() < warm:
                run(next(count[name]))
            number = next(count[name])
            start = time.perf_counter()
            run(number)
            times[name].append(time.perf_counter() - start)
    return {name: taken[warmup:] for name, taken in times.items()}


def measure(case: Case, peer: Peer | None, repeats: int, seed: int, *, with_profile: bool = False) -> dict[str, Any]:
    """Times in seconds and errors of ours, and of `peer` where one is given; with the profile of more runs of ours."""
    from paged_kv.bench.bandwidth import Bandwidth
    from paged_kv.bench.ours import make_ours

    result: dict[str, Any] = {}
    if peer is not None and (reason := _unavailable(peer, case)):
        return {"peer": {"name": peer.name, "note": reason}}
    problem, ours = problem_of(case, seed), make_ours(case)
    ours.prepare(problem, case.copies)
    bandwidth = Bandwidth()
    read, size = bandwidth.read_run(ours.memory)
    runs: dict[str, Callable[[int], object]] = {"ours": ours.run, "read": read}
    if isinstance(case, AppendCase) and case.is_copy:
        runs["copy"] = bandwidth.copy_run(case.bytes)
    if peer is not None:
        try:
            peer.prepare(problem, case.copies)
            peer.run(0)
        except Exception as error:
            return {"peer": {"name": peer.name, "note": f"failed: {_line(error)}"}}
        runs["peer"] = peer.run
    before = CpuTimes.read()
    times = take_turns(runs, max(repeats, MIN_REPEATS))
    result["other_work"] = other_work(before, CpuTimes.read())
    for name, system in (("ours", ours), ("peer", peer)):
        if system is not None:
            off, allowed = system.error(problem), problem.tolerance * (1 if system is ours else PEER_SLACK)
            result[name] = {"name": system.name, "seconds": times[name], "error": off, "right": off <= allowed}
    result["read"] = {"seconds": times["read"], "bytes": size, "loop": bandwidth.chosen["read"]}
    if "copy" in times:
        result["copy"] = {"seconds": times["copy"], "bytes": case.bytes, "loop": bandwidth.chosen["copy"]}
    if with_profile:
        try:
            result["profile"] = ours.profile(MIN_REPEATS)
        except ContractError as error:
            result["profile"] = [str(error)]
    return result


def _unavailable(peer: Peer, case: Case) -> str | None:
    try:
        return peer.available(case)
    except ImportError as error:
        return f"not installed: {_line(error)}"
    except Exception as error:
        return f"failed: {_line(error)}"


def _line(error: Exception) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def main(arguments: list[str]) -> None:
    path, name, peer, repeats, profile, *target = arguments
    if target:
        set_virtual_cpu_target(target[0])
    case = next(case for case in CASES if case.name == name)
    seed = time.time_ns() % 2**32
    system = None if peer == "-" else named(PEERS[peer])()
    result = measure(case, system, int(repeats), seed, with_profile=profile != "-")
    Path(path).write_text(json.dumps(result | {"seed": seed}))


if __name__ == "__main__":
    main(sys.argv[1:])
