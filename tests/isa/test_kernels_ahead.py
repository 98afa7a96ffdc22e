"""Kernels compiled ahead for two CPUs by a real compiler: loaded and run without a compile, on the CPUs that can."""

import os
import sys

import pytest

from paged_kv.build_kernels import kernel_bundles
from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target
from paged_kv.runtime.installed import read_compressed
from paged_kv.runtime.kernel_build import build
from support import kernels_ahead
from support.isa import can_run

LOWER, FOREIGN = "haswell", "sapphirerapids"

CALL = """
import numpy as np
import paged_kv
from max.driver import get_virtual_cpu_target
v, s = np.array([[[1.0] * 8] * 2, [[3.0] * 8] * 2], np.float32), np.zeros((2, 2), np.float32)
try:
    merged, lse = paged_kv.merge_state(v, s, v + 2, s)
except Compiles:
    print(get_virtual_cpu_target(), "compiles")
else:
    assert (np.asarray(merged) == v + 1).all() and (np.asarray(lse) == 1).all(), (merged, lse)
    from paged_kv.runtime.libraries import Kernel, where_libraries_lie
    print(get_virtual_cpu_target(), *where_libraries_lie([Kernel("merge", ("float32",)).library]).values())
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Built where there is no C compiler. One of bfloat16 for a CPU with AMX makes all calls of C that there are."""
    folder = tmp_path_factory.mktemp("kernels")
    names = {LOWER: ["merge_float32"], FOREIGN: ["merge_float32", "experts_bfloat16_bfloat16"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path_factory.mktemp("nothing")))
        for target, of_target in names.items():
            assert build(kernel_bundles(), folder, [target], only=of_target, jobs=1) == []
    return folder


def call(kernels, cache, *masked):
    """Return what a process of its own, whose CPU lacks the flags `masked`, says of its first call."""
    out, messages = kernels_ahead.run(CALL, kernels, cache, *masked)
    return out.strip(), messages


@pytest.mark.skipif(not can_run(LOWER), reason=f"the CPU cannot run {LOWER}")
def test_a_first_call_takes_what_came_along(kernels, tmp_path):
    here = choose_cpu_target(CpuInfo.read())
    lesser = FOREIGN if here in (FOREIGN, "graniterapids") else LOWER
    assert call(kernels, tmp_path) == (f"{here} with the package, for {lesser}", "")
    assert call(kernels, tmp_path, "avx512f", "amx_tile")[0].endswith(f"with the package, for {LOWER}")
    assert call(kernels, tmp_path, "avx2") == ("compiles", "")
    assert not list((tmp_path / "paged-kv" / "libraries").glob("*.library"))  # nothing was kept
    path = kernels / LOWER / "merge_float32.library.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    said, warning = call(kernels, tmp_path, "avx512f", "amx_tile")
    path.write_bytes(whole)
    assert said.endswith("compiles")
    assert f"{path} is not read (it is damaged): reinstall it" in warning


def test_no_path_of_this_machine_is_in_the_code(kernels):
    for path in kernels.glob("*/*.library.xz"):
        content = read_compressed(path).content
        for place in (str(kernels), sys.prefix, os.getcwd(), os.path.expanduser("~/")):
            assert place.encode() not in content
