"""What each case should reach, by CPU family, and what a forced family changes."""

import pytest
from click.testing import CliRunner

from paged_kv.bench.cases import AMX, CASES
from paged_kv.bench.peers.vllm_cpu import library
from paged_kv.bench.targets import WITHOUT_AMX, WITHOUT_BF16, cases_of
from paged_kv.commands.bench import bench
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS


def with_goals(cases):
    return {case.name for case in cases if case.share or any(one.at_least for one in case.versus)}


@pytest.mark.parametrize("family", ["znver5", "znver4", "cooperlake"])
def test_a_family_without_amx_has_targets_of_its_own(family):
    cases = cases_of(family)
    assert with_goals(cases) == set(WITHOUT_AMX)
    assert [case.name for case in cases if case.either] == ["bf16"]
    assert not any(versus.peers == AMX for case in cases for versus in case.versus)
    assert [case.bytes for case in cases] == [case.bytes for case in CASES]


def test_other_families():
    assert cases_of("sapphirerapids") is cases_of("graniterapids") is CASES
    for family in ("haswell", "skylake-avx512"):
        assert with_goals(cases_of(family)) == set(WITHOUT_BF16)
    assert with_goals(cases_of("aarch64")) == set()


def test_goals_name_cases_and_comparisons_that_exist():
    labels = {case.name: {versus.label for versus in case.versus} for case in CASES}
    for goals in (WITHOUT_AMX, WITHOUT_BF16):
        for name, goal in goals.items():
            assert set(goal.factors) <= labels[name], name


def test_the_list_shows_the_targets_of_a_family():
    listed = CliRunner().invoke(bench, ["--list", "--target", "znver5"]).output
    assert "0.8 of the bandwidth or 2.5x vLLM CPU, page 16" in listed
    listed = CliRunner().invoke(bench, ["--list", "--target", "sapphirerapids"]).output
    assert "0.85 of the bandwidth, 2.5x vLLM CPU, page 16" in listed


def test_vllm_is_loaded_as_its_own_start_would_load_it_on_that_cpu():
    builds = {family: library(family) for family in REQUIRED_FLAGS}
    assert builds["znver5"] == builds["sapphirerapids"] == "_C.abi3.so"
    assert builds["skylake-avx512"] == builds["icelake-server"] == "_C_AVX512.abi3.so"
    assert builds["haswell"] == builds["znver3"] == library(None) == "_C_AVX2.abi3.so"
