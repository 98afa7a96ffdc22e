"""Cascades of several levels against one flat context a row, in float64; what their plan keeps and refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy, to_numpy
from paged_kv.cascade import MultiLevelCascadeAttentionWrapper
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PageTableError, ShapeError
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, load_variants, to_kind
from support.kinds import WRITABLE, kind_of
from support.levels import Cascade, build_cascade, nested_offsets
from support.properties import examples


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


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


@pytest.mark.parametrize("kind", WRITABLE)
def test_arrays_of_every_kind(kind: str) -> None:
    wrapper = MultiLevelCascadeAttentionWrapper(3, None)
    tables = [[to_kind(array, kind) for array in arrays] for arrays in TREE.tables]
    wrapper.begin_forward(*tables, *TREE.sizes, q_data_type="float32")
    found = wrapper.run(to_kind(TREE.q, kind), to_kind(TREE.cache, kind), return_lse=True)
    assert kind_of(found[0]) == kind_of(found[1]) == kind
    assert_flat(tuple(to_numpy(part) if kind == "max" else part for part in found), TREE)


def test_a_plan_keeps_no_hold_of_its_arrays() -> None:
    tables = tuple([array.copy() for array in arrays] for arrays in TREE.tables)
    wrapper = MultiLevelCascadeAttentionWrapper(3, None)
    wrapper.plan(*tables, *TREE.sizes, q_data_type="float32")
    for arrays in tables:
        for array in arrays:
            array[...] = 10**6
    assert_flat(wrapper.run(TREE.q, TREE.cache, return_lse=True), TREE)


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
    wrapper.plan(*TREE.tables, *TREE.sizes, q_data_type="float32")
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
        (longer, "qo_indptr_arr[0] ends at 8 rows, the first plan has 7"),
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


QO, INDPTR, INDICES, LAST = TREE.tables
NAMES = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")

REFUSED = [
    ({"qo_indptr_arr": QO[:2]}, ShapeError, "qo_indptr_arr has 2 entries, expected one for each of 3 levels"),
    ({"paged_kv_indices_arr": [*INDICES, INDICES[0]]}, ShapeError, "paged_kv_indices_arr has 4 entries"),
    ({"paged_kv_indptr_arr": INDPTR[0]}, ContractTypeError, "paged_kv_indptr_arr must be a list of arrays"),
    ({"paged_kv_last_page_len": None}, ContractTypeError, "paged_kv_last_page_len must be a list of arrays"),
    ({"qo_indptr_arr": [QO[0], [0, 4, 7], QO[2]]}, ContractTypeError, "qo_indptr_arr[1] must be an array"),
    ({"qo_indptr_arr": offsets([0, 7], [0, 2, 7], [0, 1, 4, 4, 7])}, PageTableError,
     "qo_indptr_arr[1]: group 0 ends at row 2, where no group of qo_indptr_arr[2] ends: levels must nest"),
    ({"qo_indptr_arr": offsets([0, 7], [0, 4, 8], [0, 1, 4, 4, 8])}, ShapeError,
     "qo_indptr_arr[1] ends at 8 rows, qo_indptr_arr[0] at 7: every level has all"),
    ({"qo_indptr_arr": offsets([0, 7], [4, 0, 7], [0, 1, 4, 4, 7])}, PageTableError, "qo_indptr_arr[1][0] must be 0"),
    ({"qo_indptr_arr": offsets([0, 7], [0, 4, 3], [0, 1, 4, 4, 7])}, PageTableError, "decreases at request 1"),
    ({"qo_indptr_arr": offsets([0, 7], [0, 7], [0, 1, 4, 4, 7])}, ShapeError, "qo_indptr_arr[1] must have B + 1 = 3"),
    ({"paged_kv_last_page_len": [LAST[0], LAST[1], LAST[2][:3]]}, ShapeError, "paged_kv_last_page_len[2] must have B"),
    ({"paged_kv_last_page_len": [LAST[0] + 16, LAST[1], LAST[2]]}, PageTableError, "paged_kv_last_page_len[0]: "),
    ({"paged_kv_indices_arr": [INDICES[0][:1], *INDICES[1:]]}, PageTableError, "paged_kv_indptr_arr[0]: request 0"),
    ({"num_kv_heads": 3}, ShapeError, "num_qo_heads: 4 is no multiple of num_kv_heads, which is 3"),
    ({"page_size": 0}, ContractError, "page_size must be at least 1"),
    ({"head_dim": 12}, ShapeError, "head_dim must be a multiple of 8"),
    ({"pos_encoding_mode": "rope"}, ContractError, "pos_encoding_mode must be one of"),
    ({"window_left": -3}, ContractError, "window_left must be at least -1"),
    ({"q_data_type": "int8"}, ContractTypeError, "q_data_type: int8 is none of"),
    ({"kv_data_type": "float16"}, ContractTypeError, "kv_data_type: float16 must equal q's float32"),
    ({"o_data_type": "int8"}, ContractTypeError, "o_data_type: int8 is none of"),
    ({"causal": np.ones(2)}, ContractTypeError, "causal must be true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_plan_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = planned(TREE)
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim", "page_size"), TREE.sizes, strict=True))
    given = dict(zip(NAMES, TREE.tables, strict=True)) | sizes | {"q_data_type": "float32"} | changes
    with pytest.raises(error) as raised:
        wrapper.plan(**given)
    assert isinstance(raised.value, PagedKVError)
    assert message in str(raised.value)
    assert_flat(wrapper.run(TREE.q, TREE.cache, return_lse=True), TREE)  # as planned before


RUNS = [
    ({"q": TREE.q[:6]}, ShapeError, "q: shape [6, 4, 32], planned [T, num_qo_heads, head_dim] = [7, 4, 32]"),
    ({"q": TREE.q.astype(np.float16)}, ContractTypeError, "q: dtype float16, planned float32"),
    ({"q": None}, ContractTypeError, "q must be an array"),
    ({"paged_kv_cache": TREE.cache[:, :, :8]}, ShapeError, "paged_kv_cache: page_size of k is 8, planned 16"),
    ({"paged_kv_cache": TREE.cache.astype(np.float16)}, ContractTypeError, "paged_kv_cache: dtype float16 of k"),
    ({"paged_kv_cache": TREE.cache[:3]}, PageTableError, "outside the cache's [0, 3)"),
    ({"return_lse": np.ones(2)}, ContractTypeError, "return_lse must be true or false"),
]


@pytest.mark.parametrize(("changes", "error", "message"), RUNS, ids=lambda value: str(value)[:30])
def test_what_run_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        planned(TREE).run(**{"q": TREE.q, "paged_kv_cache": TREE.cache} | changes)
    assert message in str(raised.value)


def test_a_page_id_is_named_with_its_level() -> None:
    indices = [*INDICES[:2], INDICES[2].copy()]
    indices[2][4] = 99
    wrapper = MultiLevelCascadeAttentionWrapper(3, None)
    wrapper.plan(QO, INDPTR, indices, LAST, *TREE.sizes, q_data_type="float32")
    with pytest.raises(PageTableError, match=r"paged_kv_indices_arr\[2\]: request 3, slot 0 holds page id 99"):
        wrapper.run(TREE.q, TREE.cache)


def test_what_the_wrapper_refuses() -> None:
    lists = buffers_of(TREE)
    for arguments, error, message in (
        ((0, None), ContractError, "num_levels must be at least 1"),
        ((2.0, None), ContractTypeError, "num_levels must be an integer"),
        ((2, None, "HDN"), ContractError, "kv_layout must be"),
        ((3, None, "NHD", True), ContractError, "qo_indptr_buf_arr is needed where the levels live in buffers"),
        ((3, None, "NHD", True, lists[0][:2], *lists[1:]), ShapeError, "qo_indptr_buf_arr has 2 entries"),
        ((3, None, "NHD", True, lists[0], lists[0], *lists[2:]), ContractError, "shares memory with"),
        ((3, None, "NHD", True, *lists[:3], [None] * 3), ContractError, "paged_kv_last_page_len_buf_arr[0] is None"),
        ((3, None, "NHD", True, *lists[:3], lists[0]), ShapeError, "qo_indptr_buf_arr[0] has 2 entries, expected 3"),
    ):
        with pytest.raises(error) as raised:
            MultiLevelCascadeAttentionWrapper(*arguments)
        assert message in str(raised.value)
    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(16))
    wrapper.reset_workspace_buffer(torch.empty(16), [torch.empty(16)] * 2)
    with pytest.raises(ContractError, match="run: nothing is planned"):
        wrapper.run(TREE.q, TREE.cache)
