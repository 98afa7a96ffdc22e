"""The tensor map's kernel, compiled for sm_90a without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.mojo_programs import TESTS, mojo, package


@pytest.fixture(scope="module")
def sm90_kernel(tmp_path_factory) -> Path:
    """The PTX of compile_tensor_map.mojo's kernel, compiled without a GPU."""
    folder = tmp_path_factory.mktemp("sm_90a")
    target = ["--target-accelerator", "sm_90a", "--emit", "asm", "-o", folder / "host.s"]
    result = mojo("build", "--Werror", "-I", package(), *target, TESTS / "compile_tensor_map.mojo")
    assert result.returncode == 0, result.stderr
    (kernel,) = folder.glob("*.ptx")
    return kernel


def test_tensor_map_compiles_for_sm_90a(sm90_kernel):
    ptx = sm90_kernel.read_text()
    assert ".target sm_90a" in ptx
    # One copy for each swizzle atom of a head of 128 bfloat16.
    assert ptx.count("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes") == 2
    assert "mbarrier.try_wait" in ptx


def test_ptxas_takes_the_kernel(sm90_kernel):
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    ptxas = shutil.which("ptxas", path=search)
    if ptxas is None:
        pytest.skip("no ptxas found: the PTX was not assembled")
    command = [ptxas, "-arch=sm_90a", "-v", "-o", sm90_kernel.with_suffix(".cubin"), sm90_kernel]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in result.stderr
