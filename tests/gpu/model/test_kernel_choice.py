"""People are told of kernels by the kernels' own rules: for every pair of dtypes, on the CPU and on GPUs.

Found here: an explanation that is not the dispatch's. Sizes and strides that the Hopper kernel refuses:
tests/mojo/test_hopper_requirements.mojo.
"""

from functools import cache

import pytest

from gpu.model import programs
from gpu.rules import attention_kernel, hopper_refusal
from paged_kv.errors import ToolchainError
from paged_kv.graphs.ops import DTYPES
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.runtime.cpu_target import CpuInfo, apply_cpu_target
from paged_kv.runtime.doctor import explain_kernels
from paged_kv.runtime.kernel_choice import ARCHITECTURES, attention_kernels, explain
from support.dtype_pairs import PAIRS


@cache
def explained(architecture: str | None, head_dim: int, group: int, page_size: int) -> dict[tuple[str, str], str]:
    """By the dtypes of q and of the cache: the kernel and the reason. Rotary keys are ("rotary", "keys")."""
    target = None if architecture else apply_cpu_target()
    lines = [line.split(maxsplit=3) for line in explain(architecture, head_dim, group, page_size, target)]
    *pairs, rotary = lines
    assert rotary[:3] == ["rotary", "keys,", "any"]
    assert {over for _, over, _, _ in pairs} == {"over"}
    found = {(q_dtype, kv_dtype): choice for q_dtype, _, kv_dtype, choice in pairs}
    assert found.keys() == {*PAIRS, *OF_CODES}
    assert len(found) == len(pairs)
    return {**found, ("rotary", "keys"): rotary[3].removeprefix("dtypes").strip()}


OF_CODES = [(q.name, codes) for q in DTYPES for codes in CODE_DTYPES]
ROTARY = ("rotary", "keys")
HALF = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("architecture", "sizes", "pair", "kernel", "word"),
    [
        (None, (8, 1, 1), ("float32", "float32"), "cpu/vectors", "AMX"),
        (None, (8, 1, 1), ROTARY, "as above", "rotated"),
        (None, (8, 1, 1), ("bfloat16", "int4"), "cpu/vectors", "AMX"),
        ("sm_90a", (128, 4, 16), ("bfloat16", "int8"), "gpu/generic", "not bfloat16 with int8"),
        ("gfx942", (128, 4, 16), ("float16", "int4"), "gpu/generic", "sm_90a alone, not for MI300X"),
        ("sm_90a", (128, 4, 16), HALF, "gpu/hopper", "holds"),
        ("sm_90a", (80, 4, 16), HALF, "gpu/generic", "head_dim 64, 128 and 256, not 80"),
        ("sm_90a", (128, 4, 16), ROTARY, "gpu/generic", "rotates them"),
        ("sm_100a", (128, 4, 16), HALF, "gpu/generic", "sm_90a alone, not for B200"),
        ("gfx942", (128, 4, 16), ("float16", "float16"), "gpu/generic", "sm_90a alone, not for MI300X"),
    ],
)
def test_choices(architecture, sizes, pair, kernel, word):
    found, why = explained(architecture, *sizes)[pair].split(": ", 1)
    assert found == kernel
    assert word in why


def test_every_pair_on_hopper():
    choices = explained("sm_90a", 128, 4, 16)
    assert list(choices) != []
    for pair in PAIRS + OF_CODES:
        refusal = hopper_refusal(*pair, 128, 4, 16)
        taken = refusal == "-"
        expected = "gpu/hopper: all that it requires holds" if taken else f"gpu/generic: not gpu/hopper: {refusal}"
        assert choices[pair] == expected


def test_every_pair_on_the_cpu():
    """AMX is for bfloat16 queries alone, and only where the CPU has it."""
    choices = explained(None, 8, 1, 1)
    has_amx = "amx_bf16" in CpuInfo.read().flags
    for q_dtype, kv_dtype in PAIRS:
        kernel = choices[q_dtype, kv_dtype].split(":")[0]
        assert kernel in (("cpu/vectors", "cpu/amx") if has_amx and q_dtype == "bfloat16" else ("cpu/vectors",))


def test_an_unknown_gpu_is_one_line():
    with pytest.raises(ToolchainError, match="sm_1") as error:
        explain("sm_1", 128, 4, 16)
    assert "\n" not in str(error.value)


def test_the_doctor_prints_a_block_for_each_device():
    text = explain_kernels(["sm_90a", "sm_90a"], 128, 4, 16, apply_cpu_target())
    blocks = text.strip().split("\n\n")
    assert [block.split(":")[0] for block in blocks] == ["cpu", "sm_90a"]
    assert all(len(block.splitlines()) == 1 + len(PAIRS) + len(OF_CODES) + 1 for block in blocks)


@pytest.mark.parametrize("architecture", programs.ARCHITECTURES)
def test_the_kernels_of_a_gpu_are_those_of_its_calls(architecture):
    """The doctor speaks of a GPU without compiling anything, and no GPU that is compiled for is left out."""
    best = attention_kernel(architecture, *HALF, 128, 4, 16)
    assert explained(architecture, 128, 4, 16)[HALF].startswith(f"{best}:")
    assert attention_kernels(architecture).startswith(best)
    assert set(ARCHITECTURES) == set(programs.ARCHITECTURES)
