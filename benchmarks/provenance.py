"""The machine, date and commit of a figure."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from paged_kv.bench import provenance as machine

CHECKOUT = Path(__file__).resolve().parents[1]


def provenance(target: str | None = None) -> dict[str, str]:
    """CPU model, date and commit of a measurement, empty where unknown; and the target, where it is not this CPU's."""
    return machine.provenance(target) | {"commit": commit(CHECKOUT)}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout; empty where there is none."""
    if (checkout / ".git").exists():  # not of a repository that an environment happens to lie in
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""
