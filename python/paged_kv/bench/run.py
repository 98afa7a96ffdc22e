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
from paged_kv.bench.cases import Selection
from paged_kv.bench.provenance import provenance, versions
from paged_kv.bench.results import row_of
from paged_kv.errors import ContractError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

JOB_SECONDS = 900
"""After which a job is given up: a compile may be part of it."""
GRID = "paged_kv.bench.cases"
ONEDNN_ISAS = {
    "amx_bf16": "AVX512_CORE_AMX",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512f": "AVX512_CORE",
}
"""By a flag of a CPU, the best first, what oneDNN calls the instructions that it may use there."""


def merged(path: Path, results: dict[str, Any], cases: Sequence[Case]) -> dict[str, Any]:
    """`results`, with rows of an earlier file for cases that were not measured now: in the grid's order, then
    those that it does not have.
    """
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {row["case"]: row for row in [*earlier["rows"], *results["rows"]]}
    order = [name for name in dict.fromkeys([*(case.name for case in cases), *rows]) if name in rows]
    systems = {"versions": earlier.get("versions", {}) | results["versions"]}  # of systems that older rows are of
    return earlier | results | systems | {"rows": [rows[name] for name in order]}


class Run:
    """All jobs of a selection of a grid, one after the other, each in its own process.

    Args:
        selection: The cases.
        repeats: Turns behind a median.
        prefix: What is put before each job's command.
        family: The CPU family.
        target: Where ours are compiled for another one than this CPU's.
        grid: The module of the cases and peers.
        with_profile: Whether ours, alone, says where the time of a model's steps goes.
    """

    def __init__(
        self,
        selection: Selection,
        repeats: int,
        prefix: Sequence[str],
        family: str,
        target: str | None = None,
        grid: str = GRID,
        *,
        with_profile: bool = False,
    ) -> None:
        self._selection, self._repeats, self._prefix = selection, repeats, prefix
        self._family, self._target, self._grid = family, target, grid
        self._with_profile = with_profile

    def results(self) -> Iterator[dict[str, Any]]:
        """After each case, all so far: rows (`results.row_of`), and versions."""
        facts = provenance(self._target)
        rows: list[dict[str, Any]] = []
        for case in self._selection.cases:
            rows.append(row_of(case, self._jobs(case), facts))
            yield {"family": self._family, **facts, "versions": versions(), "rows": list(rows)}

    def _jobs(self, case: Case) -> dict[str, dict[str, Any]]:
        """Return what each job returned, by peer; alone ("-") first."""
        jobs = {"-": self.job(case.name, "-")}
        for peer in case.peers if self._selection.with_peers else ():
            jobs[peer] = self.job(case.name, peer)
        return jobs

    def job(self, case: str, peer: str) -> dict[str, Any]:
        """The job's result; {"note": why} where it died."""
        click.echo(f"{case}{'' if peer == '-' else f' against {peer}'} ...", err=True)
        profile = "profile" if self._with_profile and peer == "-" else "-"
        target = [self._target] if self._target else []
        arguments = [self._grid, case, peer, str(self._repeats), profile, *target]
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
            found: dict[str, Any] = json.loads(path.read_text())
            return found
    return {"note": reason(done.returncode, done.stderr.decode(errors="replace"))}


def reason(status: int, stderr: str) -> str:
    """The cause of a job's death, in one line."""
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1][:160]}" if lines else f"exit status {status}"
