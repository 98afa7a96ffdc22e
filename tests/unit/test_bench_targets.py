"""What each case should reach, by CPU family, and what a forced family changes."""

import pytest
from click.testing import CliRunner

from paged_kv.benchmarks import decode_cpu
from paged_kv.benchmarks.cases import AMX, CASES
from paged_kv.benchmarks.peers.vllm_cpu import library
from paged_kv.benchmarks.targets import WITHOUT_AMX, WITHOUT_BF16, cases_of
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

ROTATED = {f"rope-{name}": (None, {"ours-rotated": 0.5}) for name in ("bf16", "f32", "prefill")}
# What is asked for on CPUs with bfloat16 dot products and no AMX.
ASKED = {
    "bf16": (0.8, {"vllm-16": 2.5}),
    "f32": (None, {"vllm-16 vllm-32": 1.7}),
    "group1": (0.75, {}),
    "group2": (0.75, {}),
    "group8": (0.75, {}),
    "group16": (0.6, {}),
    "hnd": (0.75, {}),
    "max-layout": (0.75, {}),
    "e4m3": (None, {"ours-bf16": 1.5}),
    "linear-1": (0.85, {"torch-linear": 1.2}),
    "linear-8": (0.85, {"torch-linear": 1.2}),
    "step-1": (None, {"vllm-step": 1.1, "llama.cpp": 1.2}),
    "step-8": (None, {"vllm-step": 1.1}),
    "step-prefill": (None, {"vllm-step": 1, "transformers": 1.2}),
    "prefill": (None, {"torch": 2}),
    "prefill-wrapper": (None, {"torch": 1.2, "vllm-16 vllm-32": 1}),
    "prefill-cached": (None, {"torch": 1.2, "vllm-16 vllm-32": 1}),
    "new4": (None, {"ours-1": 0.8}),
    **ROTATED,
    "cascade-8": (None, {"ours-flat": 4}),
    "cascade-32": (None, {"ours-flat": 4}),
    "mla-16": (None, {"vllm-mla": 1, "torch-mla torch-mla-sdpa": 2}),
    "mla-64": (None, {"vllm-mla": 1, "torch-mla torch-mla-sdpa": 2}),
}


def asked(cases):
    found = {
        case.name: (case.share, {" ".join(v.peers): v.at_least for v in case.versus if v.at_least is not None})
        for case in cases
    }
    return {name: goal for name, goal in found.items() if goal != (None, {})}


@pytest.mark.parametrize("family", ["znver5", "znver4", "cooperlake"])
def test_a_family_without_amx_has_targets_of_its_own(family):
    cases = cases_of(family)
    assert asked(cases) == ASKED
    assert [case.name for case in cases if case.either] == ["bf16"]
    assert not any(versus.peers == AMX for case in cases for versus in case.versus)
    assert [case.bytes for case in cases] == [case.bytes for case in CASES]


def test_other_families():
    assert cases_of("sapphirerapids") is cases_of("graniterapids") is CASES
    for family in ("haswell", "skylake-avx512"):
        assert asked(cases_of(family)) == {"bf16": (None, {"vllm-16": 1.5, "torch": 2}), **ROTATED}
    assert asked(cases_of("aarch64")) == {}


def test_goals_name_cases_and_comparisons_that_exist():
    labels = {case.name: {versus.label for versus in case.versus} for case in CASES}
    for goals in (WITHOUT_AMX, WITHOUT_BF16):
        for name, goal in goals.items():
            assert set(goal.factors) <= labels[name], name


def test_the_list_shows_the_targets_of_a_family():
    listed = CliRunner().invoke(decode_cpu.bench, ["--list", "--target", "znver5"]).output
    assert "0.8 of the bandwidth or 2.5x vLLM CPU, page 16" in listed
    listed = CliRunner().invoke(decode_cpu.bench, ["--list", "--target", "sapphirerapids"]).output
    assert "0.85 of the bandwidth, 2.5x vLLM CPU, page 16" in listed


def test_vllm_is_loaded_as_its_own_start_would_load_it_on_that_cpu():
    builds = {family: library(family) for family in REQUIRED_FLAGS}
    assert builds["znver5"] == builds["sapphirerapids"] == "_C.abi3.so"
    assert builds["skylake-avx512"] == builds["icelake-server"] == "_C_AVX512.abi3.so"
    assert builds["haswell"] == builds["znver3"] == library(None) == "_C_AVX2.abi3.so"
