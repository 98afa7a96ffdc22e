"""Kernels compiled ahead for two CPUs by a real compiler: loaded and run without a compile, on the CPUs that can."""

import os
import subprocess
import sys

import pytest

from paged_kv.runtime.compiled_ahead import read_compressed
from paged_kv.runtime.cpu_target import CpuInfo, choose_cpu_target
from paged_kv.runtime.kernel_build import build
from support.isa import can_run

LOWER, FOREIGN = "haswell", "sapphirerapids"

CALL = """
import sys, warnings
from pathlib import Path
from paged_kv.runtime import artefacts, compiled_ahead
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
roots, masked = [Path(sys.argv[1])], sys.argv[2].split()
cpu = CpuInfo.read()
CpuInfo.read = lambda: CpuInfo(cpu.machine, cpu.model_name, cpu.flags - set(masked))
compiled_ahead.kernel_roots = lambda: roots

class Compiles(Exception): ...

def refuse(*_):
    raise Compiles

artefacts.compile_graphs = refuse
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
    (variant,) = paged_kv.runtime.session.default_runtime()._models
    places = artefacts.where_graphs_lie({variant.name: paged_kv.runtime.session.variant_key(variant)})
    print(get_virtual_cpu_target(), *places.values())
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    assert build(folder, [LOWER, FOREIGN], families=["merges"], jobs=1) == []
    return folder


def call(kernels, cache, *masked):
    """What a process of its own, whose CPU lacks the flags `masked`, says of its first call."""
    command = [sys.executable, "-c", CALL, str(kernels), " ".join(masked)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


@pytest.mark.skipif(not can_run(LOWER), reason=f"the CPU cannot run {LOWER}")
def test_a_first_call_takes_what_came_along(kernels, tmp_path):
    here = choose_cpu_target(CpuInfo.read())
    lesser = FOREIGN if here in (FOREIGN, "graniterapids") else LOWER
    assert call(kernels, tmp_path) == (f"{here} with the package, for {lesser}", "")
    assert call(kernels, tmp_path, "avx512f", "amx_tile")[0].endswith(f"with the package, for {LOWER}")
    assert call(kernels, tmp_path, "avx2") == ("compiles", "")
    assert not list((tmp_path / "paged-kv" / "compiled").iterdir())  # nothing was kept
    path = kernels / LOWER / "merges.graph.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    said, warning = call(kernels, tmp_path, "avx512f", "amx_tile")
    path.write_bytes(whole)
    assert said.endswith("compiles")
    assert f"{path} is not read (it is damaged): reinstall it" in warning


def test_no_path_of_this_machine_is_in_the_code(kernels):
    for target in (LOWER, FOREIGN):
        content = read_compressed(kernels / target / "merges.graph.xz").content
        for place in (str(kernels), sys.prefix, os.getcwd(), os.path.expanduser("~/")):
            assert place.encode() not in content
