"""The results of attention calls, and the arrays that they leave alone, written once for all of them."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from support.calls import CALLS, Call, i32
from support.decoding import to_kind
from support.kinds import PLACED, bytes_of, kind_of, library

pytestmark = pytest.mark.usefixtures("all_variants")


RUNS = [call for call in CALLS if call.name.endswith((".run", ".forward")) or "with_kv_cache" in call.name]
WRITES = [call for call in RUNS if {"out", "lse"} <= set(call.parameters())]
PLANS = [call for call in CALLS if call.runs]


def name_of(call: Call) -> str:
    return call.name


def results_of(call: Call) -> tuple[Any, dict[str, Any], list[np.ndarray]]:
    """The function, its valid arguments and o and lse as it returns them, or o alone."""
    run, given = call.make(), call.arguments()
    if "return_lse" in call.parameters():
        given["return_lse"] = True
    found = run(**given)
    return run, given, list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("call", RUNS, ids=name_of)
def test_results_have_the_kind_of_q(call: Call, kind: str) -> None:
    run, given, expected = results_of(call)
    found = run(**{name: to_kind(one, kind) if isinstance(one, np.ndarray) else one for name, one in given.items()})
    found = list(found) if isinstance(found, tuple) else [found]
    assert {kind_of(one) for one in found} == {library(kind)}
    assert bytes_of(found) == bytes_of(expected)


@pytest.mark.parametrize("call", RUNS, ids=name_of)
def test_results_are_fresh_and_arguments_left_alone(call: Call) -> None:
    run, given, first = results_of(call)
    before, kept = bytes_of([*given.values()]), bytes_of(first)
    name = next(iter(given))
    run(**given | {name: -given[name]})
    assert bytes_of(first) == kept
    assert bytes_of([*given.values()]) == before


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("call", WRITES, ids=name_of)
def test_results_are_written_where_they_are_asked_for(call: Call, kind: str) -> None:
    run, given, expected = results_of(call)
    out, lse = (to_kind(np.full_like(one, np.nan), kind) for one in expected)
    found = run(**given, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    assert bytes_of([out, lse]) == bytes_of(expected)


@pytest.mark.parametrize("call", WRITES, ids=name_of)
def test_results_may_be_strided_parts(call: Call) -> None:
    run, given, expected = results_of(call)
    wide, sums = (np.zeros((*one.shape[:-1], 2 * one.shape[-1]), one.dtype) for one in expected)
    run(**given, out=wide[..., ::2], lse=sums[..., 1::2])
    assert bytes_of([np.ascontiguousarray(wide[..., ::2]), np.ascontiguousarray(sums[..., 1::2])]) == bytes_of(expected)
    assert not wide[..., 1::2].any()
    assert not sums[..., ::2].any()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("call", PLANS, ids=name_of)
def test_a_plan_keeps_no_hold_of_its_arrays(call: Call, equal: bool) -> None:
    """A table of as many pages for each request is dense as it is."""
    plan, given = call.make(), call.arguments()
    if "packed_custom_mask" in call.parameters() and not equal:
        given["packed_custom_mask"] = np.full(4, 0b01101101, np.uint8)
    indptr = next((name for name in given if re.fullmatch("(paged_kv_|unique_kv_)?indptr", name)), None)
    if equal and indptr:
        given |= {indptr: i32(0, 1, 2), indptr.replace("indptr", "last_page_len"): i32(3, 2)}
    plan(**given)
    expected = bytes_of(call.runs(plan.__self__))  # type: ignore[misc]
    for one in given.values():
        for array in one if isinstance(one, list) else [one]:
            if isinstance(array, np.ndarray):
                np.invert(array, out=array)
    assert bytes_of(call.runs(plan.__self__)) == expected  # type: ignore[misc]


@pytest.mark.parametrize("call", WRITES, ids=name_of)
def test_writes_to_tensors_are_counted_for_autograd(call: Call) -> None:
    run, given, expected = results_of(call)
    out, lse = (torch.from_numpy(np.zeros_like(one)) for one in expected)
    run(**given, out=out, lse=lse)
    assert (out._version, lse._version) == (1, 1)
