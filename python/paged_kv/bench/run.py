"""All jobs of a benchmark, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.goals import goals_of, with_goal
from paged_kv.bench.provenance import provenance, versions
from paged_kv.bench.results import row_of
from paged_kv.errors import ContractError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

JOB_SECONDS = 900
"""After which a job is given up: a compile may be part of it."""
ONEDNN_ISAS = {
    "amx_bf16": "AVX512_CORE_AMX",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512f": "AVX512_CORE",
}
"""By a flag of a CPU, the best first, what oneDNN calls the instructions that it may use there."""


class Run:
    """All jobs of some cases, one after the other, each in its own process.

    Args:
        cases: The cases.
        repeats: Turns behind a median.
        prefix: What is put before each job's command.
        family: The CPU family.
        target: Where ours are compiled for another one than this CPU's.
        with_peers: Whether other systems run too.
        with_profile: Whether ours, alone, says where the time of a model's steps goes.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        repeats: int,
        prefix: Sequence[str],
        family: str,
        target: str | None = None,
        *,
        with_peers: bool = True,
        with_profile: bool = False,
    ) -> None:
        self._cases, self._repeats, self._prefix = cases, repeats, prefix
        self._family, self._target = family, target
        self._with_peers, self._with_profile = with_peers, with_profile

    def results(self) -> Iterator[dict[str, Any]]:
        """After each case, all so far: rows (`results.row_of`), versions, and peaks (`peaks`)."""
        facts: dict[str, Any] = {"family": self._family, "versions": versions(), "rows": [], "peaks": self.peaks()}
        goals = goals_of(self._family)
        for case in self._cases:
            row = row_of(case, self._jobs(case), provenance(self._target))
            facts["rows"].append(with_goal(row, goals))
            yield facts

    def peaks(self) -> dict[str, float]:
        """Return the arithmetic that torch reaches, by dtype; nothing where no other system runs."""
        if not self._with_peers:
            return {}
        arguments = self._prefix, "paged_kv.bench.peaks", str(self._repeats)
        return dict(run_job(*arguments, limits=limits(self._target)).get("peaks", {}))

    def _jobs(self, case: Case) -> dict[str, dict[str, Any]]:
        """Return what each job returned, by peer; alone ("-") first."""
        jobs = {"-": self.job(case.name, "-")}
        for peer in case.peers if self._with_peers else ():
            jobs[peer] = self.job(case.name, peer)
        return jobs

    def job(self, case: str, peer: str) -> dict[str, Any]:
        """The job's result; {"note": why} where it died."""
        click.echo(f"{case}{'' if peer == '-' else f' against {peer}'} ...", err=True)
        profile = "profile" if self._with_profile and peer == "-" else "-"
        target = [self._target] if self._target else []
        arguments = [case, peer, str(self._repeats), profile, *target]
        return run_job(self._prefix, "paged_kv.bench.job", *arguments, limits=limits(self._target))


def limits(target: str | None) -> dict[str, str]:
    """Environment variables that keep torch and oneDNN, which other systems are built on too, to a target's vectors."""
    if target is None:
        return {}
    flags = REQUIRED_FLAGS[target]
    best = next((isa for flag, isa in ONEDNN_ISAS.items() if flag in flags), "AVX2")
    return {"ONEDNN_MAX_CPU_ISA": best} | ({} if "avx512f" in flags else {"ATEN_CPU_CAPABILITY": "avx2"})


def run_job(
    prefix: Sequence[str], module: str, *arguments: str, limits: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs a module in a process of its own, with the path of its result before the arguments; {"note": why} where it
    died. `limits` is added to its environment.

    Raises:
        ContractError: the prefix is no command.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "result.json"
        command = [*prefix, sys.executable, "-m", module, str(path), *arguments]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=JOB_SECONDS,
                check=False,
                env=os.environ | (limits or {}),
            )
        except subprocess.TimeoutExpired:
            return {"note": f"no result after {JOB_SECONDS} s"}
        except OSError as error:
            raise ContractError(f"--prefix: {error}") from None
        if done.returncode == 0 and path.exists():
            result: dict[str, Any] = json.loads(path.read_text())
            return result
    return {"note": reason(done.returncode, done.stderr.decode(errors="replace"))}


def reason(status: int, stderr: str) -> str:
    """The cause of a job's death, in one line."""
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1][:160]}" if lines else f"exit status {status}"
