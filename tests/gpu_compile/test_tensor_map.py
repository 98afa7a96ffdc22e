"""The tensor map's kernel, compiled for sm_90a without a GPU, and what the driver is told of a map."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.mojo_programs import TESTS, mojo, package
from support.ptx_tensor_map import SWIZZLES, TensorMap


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
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in result.stderr


# Stands before MAX's function of that name, which hands the numbers to the driver's cuTensorMapEncodeTiled.
RECORDER = r"""
#include <stdint.h>
#include <stdio.h>
const char *AsyncRT_cuda_tensorMapEncodeTiled(void *map, int32_t dtype, int32_t rank, void *buffer, const int64_t *dims,
        const int64_t *strides, const int32_t *box, const int32_t *element_strides, int32_t interleave,
        int32_t swizzle, int32_t l2, int32_t fill) {
    printf("TOLD %d %d %d %d %d\n", dtype, interleave, swizzle, l2, fill);
    for (int i = 0; i < rank; i++)
        printf("DIM %ld %ld %d %d\n", (long)dims[i], i + 1 < rank ? (long)strides[i] : 0, box[i], element_strides[i]);
    fflush(stdout);
    return 0;
}
"""
DRIVER_DTYPES = {6: "f16", 9: "bf16"}
ADDRESS = 1 << 40


def test_what_the_driver_is_told(tmp_path):
    """Every number of each map is that of NumPy's view of the cache."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler found: what the driver is told was not recorded")
    (tmp_path / "recorder.c").write_text(RECORDER)
    recorder, program = tmp_path / "recorder.so", tmp_path / "print_tensor_maps"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", recorder, tmp_path / "recorder.c"], check=True, timeout=300)
    result = mojo("build", "--Werror", "-I", package(), "-o", program, TESTS / "print_tensor_maps.mojo")
    assert result.returncode == 0, result.stderr
    environment = {**os.environ, "LD_PRELOAD": str(recorder)}
    result = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    check_told(result.stdout)


def check_told(output: str) -> None:
    cases = output.split("MAP_OF ")[1:]
    assert len(cases) == 6
    for case in cases:
        lines = [line.split() for line in case.splitlines()]
        layout, (pages, page_size, heads, dim) = lines[0][1], map(int, lines[0][2:])
        order = (0, 2, 1, 3) if layout == "HND" else (0, 1, 2, 3)
        sizes = (pages, page_size, heads, dim)
        blocks = np.empty([sizes[axis] for axis in order], np.float16)
        view = blocks.transpose(order)  # [page, slot, head, dim]
        dtype, interleave, swizzle, l2, fill = map(int, lines[1][1:])
        assert (interleave, l2, fill) == (0, 2, 0), case  # L2_128B, zeros outside
        dims, strides, box, steps = zip(*(map(int, line[1:]) for line in lines[2:]), strict=True)
        assert steps == (1, 1, 1, 1), case
        told = TensorMap(ADDRESS, DRIVER_DTYPES[dtype], dims, strides[:-1], box, SWIZZLES[swizzle])
        row = 8 if heads == 1 else 64
        # [dim, head, slot, page], innermost first
        expected = TensorMap(
            ADDRESS,
            "f16" if lines[0][0] == "float16" else "bf16",
            view.shape[::-1],
            view.strides[-2::-1],
            (row, 1, 16, 1),
            0 if heads == 1 else 128,
        )
        assert told == expected, case
