"""The benchmark's cascade: what it counts, and that both ways of computing it are right."""

import pytest

from paged_kv.benchmarks.cascade import OursCascade, OursFlat
from paged_kv.benchmarks.case_kinds import CascadeCase
from paged_kv.benchmarks.problems import problem_of


def test_a_cascade_counts_the_shared_tokens_once():
    case = CascadeCase("", "", batch=3, shared=32, own=16, heads=4, kv_heads=2)
    assert case.bytes == 2 * (32 + 3 * 16) * 2 * 128 * 2
    assert case.flops == case.flat.flops == 4 * 3 * 48 * 4 * 128


@pytest.mark.parametrize("system", [OursCascade, OursFlat])
def test_a_cascade_is_right_either_way(system):
    problem = problem_of(CascadeCase("", "", batch=3, shared=32, own=16, heads=4, kv_heads=2))
    ours = system()
    ours.prepare(problem, 2)
    for i in range(3):
        ours.run(i)
        assert ours.error(problem) <= problem.tolerance
