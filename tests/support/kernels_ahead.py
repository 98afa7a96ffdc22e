"""Processes that find kernels compiled ahead in one folder, and that may not compile."""

import os
import subprocess
import sys
from pathlib import Path

_START = """
import sys
from pathlib import Path
from paged_kv.runtime import artefacts, installed, libraries
from paged_kv.runtime.cpu_target import CpuInfo
roots, masked = [Path(sys.argv[1])], sys.argv[2].split()
cpu = CpuInfo.read()
CpuInfo.read = lambda: CpuInfo(cpu.machine, cpu.model_name, cpu.flags - set(masked))
installed.kernel_roots = lambda: roots

class Compiles(Exception): ...

def refuse(*_, **__):
    raise Compiles

artefacts.compile_graphs = libraries.build_libraries = refuse
"""

DEMO = """
from paged_kv.cli import _run
try:
    status = _run(["demo"])
except Compiles:
    print("compiles")
else:
    assert status == 0, status
"""
DOCTOR = """
from paged_kv.cli import _run
assert _run(["doctor"]) == 0
"""


def run(code: str, kernels: Path, cache: Path, *masked: str) -> tuple[str, str]:
    """Return what a process of its own, whose CPU lacks the flags `masked`, says on stdout and stderr.

    Args:
        code: It may raise `Compiles`.
        kernels: Has a folder for each target.
        cache: The cache folder of this package and of MAX.
    """
    command = [sys.executable, "-c", _START + code, str(kernels), " ".join(masked)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "MODULAR_CACHE_DIR": str(cache / "max")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr
