"""Compiled packages and libraries: one package serves every CPU target, and what is damaged is made again."""

import os
import subprocess
import sys

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.runtime.kernel_library import kernel_library
from support.isa import can_run

WIDTHS = {"skylake-avx512": 16, "haswell": 8}
"""Lanes of float32 in a register."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.mojo").write_text("from .ops import Lanes\n")
    (folder / "ops.mojo").write_text(_LANES)
    return folder


_COMPILE = """
import sys
from max.driver import CPU, set_virtual_cpu_target
set_virtual_cpu_target(sys.argv[1])
import numpy as np
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from pathlib import Path
types = [TensorType(DType.float32, ["n"], DeviceRef.CPU())]
with Graph("lanes", input_types=types, custom_extensions=[Path(sys.argv[2])]) as graph:
    out = [TensorType(DType.int64, [1], DeviceRef.CPU())]
    graph.output(*ops.custom("lanes", device=DeviceRef.CPU(), values=[graph.inputs[0]], out_types=out))
model = InferenceSession(devices=[CPU()]).load(graph)
print(int(model.execute(np.zeros(1, np.float32))[0].to_numpy()[0]))
"""
"""Prints the float32 lanes that an op was compiled for."""

_LANES = """import extensibility
from std.sys import simd_width_of
from extensibility import InputTensor, OutputTensor


@extensibility.register("lanes")
struct Lanes:
    @staticmethod
    def execute[
        target: StaticString
    ](lanes: OutputTensor[dtype=DType.int64, rank=1, ...], x: InputTensor[dtype=DType.float32, rank=1, ...]) raises:
        lanes.unsafe_ptr()[0] = Int64(simd_width_of[DType.float32]())
"""


@pytest.mark.slow
def test_one_file_serves_every_cpu_target(package):
    library = kernel_library(package)
    for target in filter(can_run, WIDTHS):
        command = [sys.executable, "-c", _COMPILE, target, str(library)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert run.stdout.strip() == str(WIDTHS[target]), run.stderr


def test_sources_that_do_not_compile_say_where(package):
    (package / "ops.mojo").write_text("def answer() -> Int:\n    return nothing\n")
    with pytest.raises(ToolchainError, match=r"does not compile: .*ops\.mojo:2"):
        kernel_library(package)


CALL = """
import numpy as np
import paged_kv
v, s = np.ones((3, 2, 8), np.float32), np.zeros((3, 2), np.float32)
merged, lse = paged_kv.merge_state(v, s, v, s)
assert (np.asarray(merged) == 1).all() and (np.asarray(lse) == 1).all()
"""


@pytest.mark.slow
def test_damaged_artefacts_are_made_again(tmp_path):
    """A real library: a process that loads it would crash. Compiled packages: unit/test_kernel_library.py."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def call():
        command = [sys.executable, "-W", "error", "-c", CALL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-2000:]
        files = [path for path in (tmp_path / "paged-kv").rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    whole = call()
    assert sorted({path.suffix for path in whole}) == [".library", ".so"]
    written = {path: path.stat().st_ino for path in whole}
    assert call() == whole
    assert {path: path.stat().st_ino for path in whole} == written  # read, not made again
    damaged = {}
    for path, content in whole.items():
        half = len(content) // 2
        damaged[path] = content[:half] + bytes(byte ^ 255 for byte in content[half : half + 64]) + content[half + 64 :]
        path.write_bytes(damaged[path])
    made = call()
    assert made.keys() == whole.keys()
    assert all(made[path] != damaged[path] for path in made)
    assert call() == made
