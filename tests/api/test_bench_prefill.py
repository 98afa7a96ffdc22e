"""The benchmark's prefill through the wrapper is right."""

import pytest

from paged_kv.benchmarks.case_kinds import PrefillCase
from paged_kv.benchmarks.prefill import OursPrefill
from paged_kv.benchmarks.problems import problem_of
from support import harness

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.mark.parametrize(("lengths", "new"), [((33,), 33), ((40, 21), 5)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_wrapper_is_right_on_every_copy(lengths: tuple[int, ...], new: int, layout: str) -> None:
    harness.runtime()
    problem = problem_of(PrefillCase("", "", lengths=lengths, new_tokens=new, layout=layout, **SIZES))
    system = OursPrefill()
    system.prepare(problem, 3)
    for i in range(4):
        system.run(i)
        assert problem.error(system.output()) <= problem.tolerance
