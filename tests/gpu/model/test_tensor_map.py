"""The tensor map of `create_tma_tile`: its kernel, compiled for sm_90a, and what the driver is told of a map.

Found here: a side, stride or swizzle that the driver is told wrongly.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest

from gpu.model import programs
from gpu.model.ptx_tensor_map import TensorMap
from support.mojo_programs import ROOT, TESTS, mojo

pytestmark = pytest.mark.waits_for(programs.tensor_map)


def test_its_kernel_compiles_and_ptxas_takes_it(tmp_path):
    (ptx,) = programs.tensor_map().values()
    # One copy for each swizzle atom of a head of 128 bfloat16.
    assert ptx.count("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes") == 2
    assert "mbarrier.try_wait" in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in programs.assembled(ptx, tmp_path / "kernel.ptx")


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
SWIZZLES = {0: 0, 3: 128}
"""Bytes of a swizzled row, by `CUtensorMapSwizzle`."""
ADDRESS = 1 << 40


def test_what_the_driver_is_told(tmp_path):
    """Every number of each map is that of NumPy's view of the cache."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler found: what the driver is told was not recorded")
    (tmp_path / "recorder.c").write_text(RECORDER)
    recorder, program = tmp_path / "recorder.so", tmp_path / "print_tensor_maps"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", recorder, tmp_path / "recorder.c"], check=True, timeout=300)
    result = mojo("build", "--Werror", "-I", ROOT, "-o", program, TESTS / "print_tensor_maps.mojo")
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
