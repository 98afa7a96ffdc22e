"""The CPU kernels compiled for ARM, where nothing here can run them: their products are vector instructions.

Compiled, not run; docs/notes/arm.md says what was run under an emulator.
"""

import re
import tempfile
from functools import partial
from pathlib import Path

import pytest

from support import background
from support.background import Job
from support.mojo_programs import MOJO, ROOT, TESTS

TARGETS = {
    "neoverse-v1": ["--target-triple", "aarch64-unknown-linux-gnu"],
    "apple-m1": ["--target-triple", "arm64-apple-macosx14.0.0", "-DFEW"],
}
VECTOR_FMA = r"^\s+fmla(\.4s\s|\s+v\d+\.4s)"
SOFT_FLOAT = r"^\s+bl\s+_?(__extend\w+|__trunc\w+|fmaf?)\b"
"""Conversions and products that a library does, one number a call."""


def compile_for(cpu: str) -> str:
    """The assembly of every CPU kernel; for a second ARM of those of some dtypes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernels.s"
        target = [*TARGETS[cpu], "--target-cpu", cpu, "--emit", "asm", "-o", output]
        command = [MOJO, "build", "-I", ROOT, "-I", TESTS, *target, TESTS / "compile_cpu_kernels.mojo"]
        result = background.run(command, timeout=1200)
        assert result.returncode == 0, result.stderr
        return output.read_text()


JOBS = {cpu: Job(partial(compile_for, cpu)) for cpu in TARGETS}


@pytest.mark.parametrize("cpu", [pytest.param(cpu, marks=pytest.mark.waits_for(job)) for cpu, job in JOBS.items()])
def test_kernels_compile_to_vector_instructions(cpu):
    assembly = JOBS[cpu]()
    assert len(re.findall(VECTOR_FMA, assembly, re.MULTILINE)) > 1000
    assert re.findall(SOFT_FLOAT, assembly, re.MULTILINE) == []
    assert len(re.findall(r"^\s+prfm\s", assembly, re.MULTILINE)) > 100
