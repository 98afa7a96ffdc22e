"""One compiled Mojo package serves every CPU target: MAX specialises it when a graph is compiled."""

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
