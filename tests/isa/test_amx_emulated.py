"""The op tests on AMX's kernels where there is no AMX: the tile registers are memory (`emulated_amx.mojo`)."""

import re
from functools import partial

import pytest

from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from support import amx_emulation
from support.background import Job
from support.isa import FEW_ENCODINGS, OP_TESTS, SAME_BITS, run_tests
from support.mojo_programs import ROOT, TESTS, mojo

RUN = Job(partial(run_tests, None, "--emulate-amx", FEW_ENCODINGS, *OP_TESTS, SAME_BITS))
REASON = amx_emulation.reason_to_skip(CpuInfo.read())
PUBLIC = re.compile(r"^(?:def|struct|comptime) (HAS_AMX\w*|amx_permitted|tile_\w+|TileShapes)\b(.*)", re.MULTILINE)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.waits_for(RUN)
def test_ops():
    RUN()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("file", ["test_prefetch.mojo", "test_attention_threads.mojo"])
def test_in_mojo(tmp_path, file):
    """Run the checks of tests/mojo that take AMX's kernels where there is AMX."""
    folder = amx_emulation.copy_package(tmp_path).parent
    result = mojo("run", "-I", folder, "-I", TESTS, TESTS / file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_has_the_names_of_the_instructions():
    real = (ROOT / "mojo_ops" / amx_emulation.INSTRUCTIONS).read_text()
    emulated = amx_emulation.EMULATION.read_text()
    assert {name for name, _ in PUBLIC.findall(real)} == {name for name, _ in PUBLIC.findall(emulated)}


def test_no_other_file_names_a_tile_register():
    files = [file for file in (ROOT / "mojo_ops").rglob("*.mojo") if "%tmm" in file.read_text()]
    assert files == [ROOT / "mojo_ops" / amx_emulation.INSTRUCTIONS]


def test_products_of_bytes_are_compiled(tmp_path):
    """The text of their instructions, which the emulation does without, for a CPU that need not be here."""
    output = tmp_path / "amx.s"
    target = ["--target-triple", "x86_64-unknown-linux-gnu", "--target-cpu", "sapphirerapids", "--emit", "asm"]
    result = mojo("build", *target, "-I", ROOT, "-o", output, TESTS / "compile_quantised_amx.mojo")
    assert result.returncode == 0, result.stderr
    products = set(re.findall(r"^\s+(tdp.*?)\s*$", output.read_text(), re.MULTILINE))
    assert products == {f"tdpbssd\t%tmm{x + 1}, %tmm{x}, %tmm{turn}" for x in (2, 4) for turn in (0, 1)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (REQUIRED_FLAGS["sapphirerapids"], "has AMX"),
        (REQUIRED_FLAGS["icelake-server"], "avx512_bf16"),
        (REQUIRED_FLAGS["icelake-server"] | {"avx512_bf16"}, "avx512vbmi, which target cooperlake lacks"),
        (REQUIRED_FLAGS["znver4"], None),
    ],
)
def test_why_it_is_skipped(flags, words):
    reason = amx_emulation.reason_to_skip(CpuInfo("x86_64", "", flags))
    assert reason is None if words is None else words in reason
