"""All jobs of a benchmark, one after the other, and where their results go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.cases import CASES, Selection
from paged_kv.bench.provenance import CHECKOUT, provenance, versions
from paged_kv.bench.results import row_of
from paged_kv.errors import ContractError

JOB_SECONDS = 900
"""After which a job is given up: a compile may be part of it."""


def default_folder() -> Path:
    """`benchmarks/results/decode_cpu` of a checkout; elsewhere a folder where the command was given."""
    results = CHECKOUT / "benchmarks" / "results"
    return results / "decode_cpu" if results.is_dir() else Path("paged-kv-bench")


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """`results`, with rows of an earlier file for cases that were not measured now, in the grid's order."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": []}
    now = {row["case"]: row for row in results["rows"]}
    rows = {row["case"]: row for row in earlier["rows"]} | now
    order = [case.name for case in CASES if case.name in rows]
    peaks = {"peaks": results.get("peaks") or earlier.get("peaks", {})}
    systems = {"versions": earlier.get("versions", {}) | results["versions"]}  # of systems that older rows are of
    return results | peaks | systems | {"rows": [rows[name] for name in order]}


class Run:
    """All jobs of a selection, one after the other, each in its own process."""

    def __init__(
        self, selection: Selection, repeats: int, prefix: list[str], family: str, target: str | None = None
    ) -> None:
        self._selection, self._repeats, self._prefix = selection, repeats, prefix
        self._family, self._target = family, target

    def results(self) -> Iterator[dict[str, Any]]:
        """After each case, all so far: rows (`results.row_of`), versions, and the peaks for the roofline."""
        facts = provenance()
        peaks = self.job("peaks", "-").get("peaks", {}) if self._selection.with_peers else {}
        rows: list[dict[str, Any]] = []
        for case in self._selection.cases:
            rows.append(row_of(case, self._jobs(case), facts))
            yield {"family": self._family, **facts, "versions": versions(), "peaks": peaks, "rows": list(rows)}

    def _jobs(self, case: Case) -> dict[str, dict[str, Any]]:
        """Return what each job returned, by peer; alone ("-") first."""
        jobs = {"-": self.job(case.name, "-")}
        for peer in case.peers if self._selection.with_peers else ():
            jobs[peer] = self.job(case.name, peer)
        return jobs

    def job(self, case: str, peer: str) -> dict[str, Any]:
        """The job's result; {"note": why} where it died."""
        click.echo(f"{case}{'' if peer == '-' else f' against {peer}'} ...", err=True)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "result.json"
            module = [sys.executable, "-m", "paged_kv.bench.job", case, peer, str(self._repeats), str(path)]
            module += [self._target] if self._target else []
            try:
                done = subprocess.run(
                    [*self._prefix, *module], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=JOB_SECONDS
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
    """Why a job died, in one line."""
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1][:160]}" if lines else f"exit status {status}"
