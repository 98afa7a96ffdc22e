"""Cascades of several levels against one flat context a row, in float64; what their plan keeps and refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy
from paged_kv.cascade import MultiLevelCascadeAttentionWrapper
from paged_kv.errors import ContractError, PageTableError, ShapeError
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE
from support.levels import Cascade, build_cascade, nested_offsets
from support.properties import examples

pytestmark = pytest.mark.usefixtures("decode_variants")


def offsets(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(entries, np.int32) for entries in lists]


def planned(case: Cascade, causal: bool = False, mode: str = "NONE", **options: Any) -> Any:
    wrapper = MultiLevelCascadeAttentionWrapper(len(case.tables[0]), None, case.layout)
    dtype = case.q.dtype.name
    wrapper.plan(*case.tables, *case.sizes, causal, mode, q_data_type=dtype, **options)
    return wrapper


def assert_flat(found: tuple[Any, Any], case: Cascade, *arguments: Any, **options: Any) -> None:
    o, lse = case.oracle(*arguments, **options)
    assert_close(as_numpy(found[0], "o"), o, rel=O_TOLERANCE[case.q.dtype.name], what="o")
    assert_lse_close(as_numpy(found[1], "lse"), lse, tol=LSE_TOLERANCE, what="lse")


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Cascade, bool, str, dict[str, Any]]:
    num_levels = draw(st.integers(1, 4))
    decode = draw(st.booleans())
    bottom = draw(st.lists(st.just(1) if decode else st.integers(0, 5), max_size=5))
    seed = draw(st.integers(0, 2**16))
    qo_indptr = nested_offsets(np.random.default_rng(seed), bottom, num_levels)
    length = st.just(0) | st.integers(0, 70) | st.sampled_from((1, 15, 16, 17, 64, 65))
    lengths = [draw(st.lists(length, min_size=len(entries) - 1, max_size=len(entries) - 1)) for entries in qo_indptr]
    case = build_cascade(
        qo_indptr,
        lengths,
        heads=draw(st.sampled_from(((1, 1), (4, 2), (7, 1), (16, 1), (6, 3)))),
        head_dim=draw(st.sampled_from((16, 64, 128))),
        page_size=draw(st.sampled_from((1, 5, 16, 64))),
        layout=draw(st.sampled_from(("NHD", "HND"))),
        seed=seed,
    )
    mode = draw(st.sampled_from(("NONE", "ROPE_LLAMA", "ALIBI")))
    options = {
        "window_left": draw(st.sampled_from((-1, -1, 0, 3, 40))),
        "logits_soft_cap": draw(st.sampled_from((0.0, 25.0))),
    }
    return case, draw(st.booleans()), mode, options


@settings(
    max_examples=examples(120), derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
)
@given(drawn_cases())
def test_levels_agree_with_one_flat_context(drawn: tuple[Cascade, bool, str, dict[str, Any]]) -> None:
    case, causal, mode, options = drawn
    found = planned(case, causal, mode, **options).run(case.q, case.cache, return_lse=True)
    assert_flat(found, case, mode, causal, **options)


TREE = build_cascade(
    offsets([0, 7], [0, 4, 7], [0, 1, 4, 4, 7]), [[40], [0, 33], [3, 17, 9, 20]], page_size=16, layout="NHD"
)
"""Three levels of seven rows; a group without rows, and one without tokens."""


def test_bfloat16_partial_outputs_are_not_rounded() -> None:
    """One rounding, of the merged output: as of the flat computation, not one for each level."""
    case = build_cascade(offsets([0, 6], [0, 3, 6], [0, 2, 3, 6]), [[60], [50, 70], [9, 8, 7]], dtype="bfloat16")
    found = planned(case, o_data_type="float32").run(case.q, case.cache, return_lse=True)
    o, lse = case.oracle()
    assert_close(found[0], o, rel=1e-5, what="o")
    assert_lse_close(found[1], lse, tol=LSE_TOLERANCE, what="lse")
    rounded = planned(case).run(case.q, case.cache)
    assert_bits_equal(rounded, found[0].astype(rounded.dtype), what="o")


def test_decode_over_a_system_prompt_and_a_document() -> None:
    case = build_cascade(offsets([0, 4], [0, 1, 4], [0, 1, 2, 3, 4]), [[48], [20, 5], [1, 0, 16, 2]], layout="HND")
    wrapper = planned(case, mode="ROPE_LLAMA", window_left=30)
    found = wrapper.forward(case.q, (case.cache[:, 0], case.cache[:, 1]), return_lse=True)
    assert_flat(found, case, "ROPE_LLAMA", window_left=30)


def test_rows_that_see_nothing() -> None:
    case = build_cascade(offsets([0, 3], [0, 1, 3]), [[0], [0, 1]])
    o, lse = planned(case, causal=True).run(case.q, case.cache, return_lse=True)
    assert (o[:2] == 0).all()
    assert np.isneginf(lse[:2]).all()
    np.testing.assert_allclose(o[2], np.repeat(case.tokens[1][1][1][0], 2, axis=0), rtol=1e-6)
    empty = build_cascade(offsets([0], [0]), [[], []])
    assert planned(empty).run(empty.q, empty.cache).shape == (0, 4, 32)


def buffers_of(case: Cascade, spare: int = 3) -> list[list[np.ndarray]]:
    lists = [[np.full(len(array), -7, np.int64) for array in arrays] for arrays in case.tables]
    lists[2] = [np.full(len(array) + spare, -7, np.int32) for array in case.tables[2]]
    return lists


def test_levels_in_the_users_buffers_are_read_again() -> None:
    lists = buffers_of(TREE)
    wrapper: Any = MultiLevelCascadeAttentionWrapper(3, None, "NHD", True, *lists)
    assert wrapper.is_cuda_graph_enabled
    with pytest.raises(ContractError, match="run: nothing is planned"):
        wrapper.run(TREE.q, TREE.cache)
    wrapper.begin_forward(*TREE.tables, *TREE.sizes, q_data_type="float32")
    assert_flat(wrapper.run(TREE.q, TREE.cache, return_lse=True), TREE)
    other = build_cascade(TREE.tables[0], [[33], [0, 47], [2, 18, 1, 17]], seed=5)
    for buffers, arrays in zip(lists, other.tables, strict=True):
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[: len(array)] = array
    assert_flat(wrapper.run(TREE.q, other.cache, return_lse=True), other_with(TREE.q, other))
    lists[0][1][1] = 3
    with pytest.raises(PageTableError, match=r"qo_indptr_buf_arr\[1\]: group 0 ends at row 3, where no group of"):
        wrapper.run(TREE.q, TREE.cache)
    before = [buffer.copy() for buffers in lists for buffer in buffers]
    longer = build_cascade(offsets([0, 8], [0, 4, 8], [0, 1, 4, 4, 8]), [[40], [0, 33], [3, 17, 9, 20]])
    refused = (
        (longer, "qo_indptr_arr[0]: expected the first plan's 7 rows, got 8"),
        (build_cascade(offsets([0, 7], [0, 7], [0, 7]), [[1], [1], [1]]), "qo_indptr_buf_arr[1] holds 3 entries"),
        (
            build_cascade(TREE.tables[0], [[200], [0, 33], [3, 17, 9, 20]]),
            "paged_kv_indices_buf_arr[0] holds 6 entries",
        ),
    )
    for case, message in refused:
        with pytest.raises(ShapeError) as raised:
            wrapper.plan(*case.tables, *case.sizes, q_data_type="float32")
        assert message in str(raised.value)
        assert all(map(np.array_equal, before, [buffer for buffers in lists for buffer in buffers]))


def other_with(q: np.ndarray, case: Cascade) -> Cascade:
    return Cascade(q, case.cache, case.layout, case.tables, case.tokens, case.sizes)


def test_another_workspace() -> None:
    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(16))
    wrapper.reset_workspace_buffer(torch.empty(16), [torch.empty(16)] * 2)
    with pytest.raises(ContractError, match="run: nothing is planned"):
        wrapper.run(TREE.q, TREE.cache)
