"""The GPU kernels as compilers make them for a GPU that is not there: each program is compiled once a session."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpu.model.cubins import Kernel, kernels
from paged_kv.graphs import ops
from paged_kv.runtime.kernel_library import kernel_library
from support import background
from support.background import Job
from support.mojo_programs import MOJO, ROOT, TESTS


def compile_program(program: str, architecture: str, *options: str) -> dict[str, str]:
    """The assembly of a program's kernels, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        target = ["--target-accelerator", architecture, "--emit", "asm", "-o", Path(folder) / "host.s", *options]
        command = [MOJO, "build", "--Werror", "-I", ROOT, *target, TESTS / program]
        result = background.run(command, timeout=1200)
        assert result.returncode == 0, result.stderr
        suffix = "*.ptx" if architecture.startswith("sm_") else "*.amdgcn"
        return {path.name: path.read_text() for path in Path(folder).glob(suffix)}


KINDS = {
    "attention": "attention_gpu_generi",
    "latent": "attention_gpu_latent",
    "combine": "attention_gpu_combin",
    "schedule": "attention_gpu_schedu",
    "merge": "attention_merge_state",
    "append": "transfer_gpu_append",
    "gather": "transfer_gpu_gather",
    "ragged_rows": "transfer_gpu_ragged",
    "copy_pages": "transfer_gpu_copy_pa",
}
"""The work of each kernel of compile_gpu_kernels.mojo, by its module: the compiler shortens the names of kernels."""


def kind_of(name: str) -> str:
    (kind,) = (kind for kind, part in KINDS.items() if part in name)
    return kind


def assembled(ptx: str, path: Path) -> str:
    """Return what `ptxas` says of a kernel for sm_90a, which is written to `path`; the test is skipped where there is
    none.
    """
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    ptxas = shutil.which("ptxas", path=search)
    if ptxas is None:
        pytest.skip("no ptxas found: the PTX was not assembled")
    path.write_text(ptx)
    command = [ptxas, "-arch=sm_90a", "-v", "-o", path.with_suffix(".cubin"), path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def job_of(program: str, architecture: str, *options: str) -> Job[dict[str, str]]:
    return Job(lambda: compile_program(program, architecture, *options))


generic = {"sm_90a": job_of("compile_gpu_kernels.mojo", "sm_90a")}
"""The kernels for any GPU, a few of each kind; for others than sm_90a, on whose model they run, fewer."""
generic |= {other: job_of("compile_gpu_kernels.mojo", other, "-DFEW") for other in ("sm_80", "sm_100a", "gfx942")}
ARCHITECTURES = tuple(generic)
hopper = job_of("compile_hopper_kernel.mojo", "sm_90a")
"""Every variant of the Hopper kernel, and what is launched around it."""
tensor_map = job_of("compile_tensor_map.mojo", "sm_90a")


def compile_graphs(program: str) -> tuple[str, list[Kernel]]:
    """Return what a program of this folder prints that compiles graphs for sm_90a, and the kernels in its artefact."""
    with tempfile.TemporaryDirectory() as folder:
        artefact = Path(folder) / "graphs.mef"
        command = [sys.executable, Path(__file__).with_name(program), "sm_90a", kernel_library(ops.kernels()), artefact]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        result = background.run(command, timeout=3600, env={**os.environ, "PYTHONPATH": path})
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout, kernels(artefact.read_bytes())


api = Job(lambda: compile_graphs("compile_api.py"), is_long=True)
"""All kernels of the API as MAX compiles them for sm_90a."""
