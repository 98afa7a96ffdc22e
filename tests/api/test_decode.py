"""The decode API's own behaviour: defaults, spellings, what it keeps and when, and what it answers with.

That the numbers are right over the whole space of options is the business of test_drawn.py.
"""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from max.dtype import DType

from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from support.cases import GROUPS, PAGE_SIZES, CacheCase, build, csr, edge_lengths, permuted
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import assert_decodes, oracle, paged_cache, plan_sizes, planned, to_kind

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 0, 48, 5), rank=5))
EMPTY_TABLE = [np.zeros(n, np.int32) for n in (1, 0, 0)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lengths_at_page_edges(page_size: int) -> None:
    cache = build(CacheCase(edge_lengths(page_size), page_size=page_size))
    assert_decodes(planned(cache).run_return_lse(cache.q, paged_cache(cache)), cache)


@pytest.mark.parametrize("group", [*GROUPS, 11, 32])
def test_every_group_size(group: int) -> None:
    cache = build(CacheCase((19, 3), num_q_heads=2 * group, num_kv_heads=2))
    assert_decodes(planned(cache).run_return_lse(cache.q, paged_cache(cache)), cache)


def test_defaults_are_flashinfers() -> None:
    """Spelled out here, so that a default that changes in the code does not change in the test as well."""
    explicit = {"sm_scale": 1 / math.sqrt(32), "window_left": -1, "logits_soft_cap": 0.0}
    assert_decodes(planned(CASE).run_return_lse(CASE.q, paged_cache(CASE)), CASE, **explicit)
    rope = planned(CASE, pos_encoding_mode="ROPE_LLAMA").run_return_lse(CASE.q, paged_cache(CASE))
    assert_decodes(rope, CASE, "ROPE_LLAMA", rope_theta=1e4, rope_scale=1.0, **explicit)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE))
    assert wrapper.run(CASE.q.astype(np.float16), CASE.k_blocks.astype(np.float16)).dtype == np.float16


def test_uniform_attention_by_hand() -> None:
    """Q = 0: every token weighs the same, so o is the mean of V and lse is log2(L)."""
    o, lse = planned(CASE).run_return_lse(np.zeros_like(CASE.q), paged_cache(CASE))
    for b, length in enumerate(CASE.case.lengths):
        mean = CASE.values[b].mean(axis=0) if length else np.zeros((2, 32))
        assert_close(o[b], mean.repeat(2, axis=0), rel=1e-5, what="o")
        assert_lse_close(lse[b], np.full(4, math.log2(length) if length else -np.inf), tol=1e-6, what="lse")


def test_nothing_to_do() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*EMPTY_TABLE, *plan_sizes(CASE), q_data_type="float32")
    o, lse = wrapper.run_return_lse(CASE.q[:0], paged_cache(CASE))
    assert (o.shape, lse.shape) == ((0, 4, 32), (0, 4))
    wrapper.plan(*(np.zeros(n, np.int32) for n in (4, 0, 3)), *plan_sizes(CASE), q_data_type="float32")
    for pool in (paged_cache(CASE), paged_cache(CASE)[:0]):
        o, lse = wrapper.run_return_lse(CASE.q[:3], pool)
        assert not o.any()
        assert np.isneginf(lse).all()
    k = np.zeros((0, 2, 32), np.float32)
    for layout, empty in (("NHD", k), ("HND", k.swapaxes(0, 1))):
        o, lse = single_decode_with_kv_cache(CASE.q[0], empty, empty, layout, return_lse=True)
        assert not o.any()
        assert np.isneginf(lse).all()


def test_queries_of_any_strides() -> None:
    wide = np.zeros((4, 8, 33), np.float32)
    q = wide[:, ::2, 1:]
    q[...] = CASE.q
    assert_decodes(planned(CASE).run_return_lse(q, paged_cache(CASE)), CASE)
    q.setflags(write=False)
    assert_decodes(planned(CASE).run_return_lse(q, paged_cache(CASE)), CASE)
    assert_decodes(planned(CASE).run_return_lse(torch.from_numpy(CASE.q).requires_grad_(), paged_cache(CASE)), CASE)


def test_one_layer_of_a_buffer_of_all_layers() -> None:
    cache = build(CacheCase((33, 16, 2), rank=6))
    layer = cache.k_blocks[:, :, cache.case.layer]
    assert_decodes(planned(cache).run_return_lse(cache.q, layer), cache)


def test_a_permutation_of_the_pages_changes_no_bit() -> None:
    moved = permuted(CASE, np.random.default_rng(1))
    first = planned(CASE).run_return_lse(CASE.q, paged_cache(CASE))
    second = planned(moved).run_return_lse(CASE.q, paged_cache(moved))
    for a, b, what in zip(first, second, ("o", "lse"), strict=True):
        assert_bits_equal(a, b, what=what)


def test_one_plan_serves_many_caches() -> None:
    """Other memory, other strides, other contents of the same memory, and memory that was freed in between."""
    wrapper = planned(CASE)
    pages = CASE.k_blocks.copy()
    assert_decodes(wrapper.run_return_lse(CASE.q, pages), CASE)
    pages *= 2
    doubled = wrapper.run_return_lse(CASE.q, pages)
    assert_decodes(doubled, build_scaled(2.0))
    assert_decodes(wrapper.run_return_lse(CASE.q, CASE.k_blocks), CASE)
    assert_decodes(wrapper.run_return_lse(CASE.q, (pages[:, 0] / 2, pages[:, 1] / 2)), CASE)
    assert_decodes(wrapper.run_return_lse(CASE.q, (CASE.k_blocks[:, 0], CASE.k_blocks[:, 1].copy())), CASE)
    # One fact of the memory changes at a time: where V lies, then how far apart the pages are.
    k, v, larger = CASE.k_blocks[:, 0].copy(), CASE.k_blocks[:, 1].copy(), 2 * CASE.k_blocks[:, 1]
    o = wrapper.run(CASE.q, (k, v))
    assert_bits_equal(wrapper.run(CASE.q, (k, larger)), 2 * o, what="o of a doubled V")
    spare = np.zeros((2 * len(pages), *pages.shape[1:]), np.float32)
    wrapper.run(CASE.q, spare[: len(pages)])
    spare[::2] = CASE.k_blocks
    assert_decodes(wrapper.run_return_lse(CASE.q, spare[::2]), CASE)
    for factor in (1.0, 3.0, 0.5):
        assert_decodes(wrapper.run_return_lse(CASE.q, build_scaled(factor).k_blocks), build_scaled(factor))


def build_scaled(factor: float) -> Any:
    """CASE with all of K and V multiplied, in memory of its own."""
    cache = build(CASE.case)
    cache.k_blocks[...] *= factor
    return cache


def test_scales_belong_to_one_run() -> None:
    wrapper = planned(CASE)
    for scales in ({"k_scale": 0.5}, {}, {"q_scale": 2.0, "v_scale": 3.0}, {"v_scale": 3.0}, {}):
        assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE), **scales), CASE, **scales)


def test_v_scale_is_not_in_the_lse_and_sinks_are() -> None:
    wrapper = planned(CASE)
    o, lse = wrapper.run_return_lse(CASE.q, paged_cache(CASE))
    scaled = wrapper.run_return_lse(CASE.q, paged_cache(CASE), v_scale=2.0)
    assert_bits_equal(scaled[1], lse, what="lse")
    assert_bits_equal(scaled[0], 2 * o, what="o")
    sinks = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)
    with_sinks = wrapper.run_return_lse(CASE.q, paged_cache(CASE), sinks=sinks)
    seen = np.isfinite(lse)
    expected = np.where(seen, np.logaddexp2(lse, sinks / math.log(2)), -np.inf)
    assert_lse_close(with_sinks[1], expected, tol=1e-6, what="lse")
    assert_bits_equal(with_sinks[0][:, 3], o[:, 3], what="the head without a sink")


def test_alibi_comes_before_the_soft_cap() -> None:
    options = {"logits_soft_cap": 2.0, "window_left": 20}
    found = planned(CASE, pos_encoding_mode="ALIBI", **options).run_return_lse(CASE.q, paged_cache(CASE))
    assert_decodes(found, CASE, "ALIBI", **options)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, "torch.float8_e4m3fn", DType.float8_e4m3fn])
def test_float8_of_torch(kv_dtype: Any) -> None:
    k, v = (torch.randn(5, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(1, 6, 64, dtype=torch.bfloat16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    table = [torch.tensor(values) for values in ([0, 2], [3, 1], [9])]
    wrapper.plan(*table, 6, 2, 64, 16, q_data_type=torch.bfloat16, kv_data_type=kv_dtype)
    o = wrapper.run(q, (k, v), k_scale=0.5, v_scale=2.0)
    assert o.dtype == torch.bfloat16
    tokens = [(array.float()[[3, 1]].reshape(32, 2, 64)[:25] * scale) for array, scale in ((k, 0.5), (v, 2.0))]
    expected = single_decode_with_kv_cache(q[0].float(), *tokens)
    assert_close(o[0].float().numpy(), expected.numpy(), rel=2e-2, what="o")


@pytest.mark.parametrize(
    "names",
    [
        {"q_data_type": "float32"},
        {"q_data_type": torch.float32},
        {"q_data_type": np.float32, "kv_data_type": DType.float32},
        {"data_type": "float32"},
        {"data_type": torch.float32, "kv_data_type": np.dtype("float32")},
        {"q_data_type": None, "data_type": "float32"},
    ],
)
def test_spellings_of_data_types(names: dict[str, Any]) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), **names)
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE)


def test_replanning() -> None:
    wrapper = planned(CASE, window_left=3, pos_encoding_mode="ALIBI")
    other = build(CacheCase((3, 40), num_q_heads=6, head_dim=64, page_size=5, rank=4))
    wrapper.plan(*csr(other), *plan_sizes(other), data_type="float32")
    assert_decodes(wrapper.run_return_lse(other.q, paged_cache(other)), other)


def test_the_older_names() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.begin_forward(*csr(CASE), *plan_sizes(CASE), window_left=9, q_data_type="float32")
    o = wrapper.forward(CASE.q, paged_cache(CASE))
    assert_bits_equal(o, wrapper.run(CASE.q, paged_cache(CASE)), what="o")
    options = {"window_left": 3, "rope_theta": 5e5, "logits_soft_cap": 4.0, "sm_scale": 0.3, "rope_scale": 2.0}
    found = wrapper.forward_return_lse(CASE.q, paged_cache(CASE), "ROPE_LLAMA", 0.5, **options)
    assert_decodes(found, CASE, "ROPE_LLAMA", q_scale=0.5, **options)
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE, window_left=9)
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(None, None)
    assert_bits_equal(wrapper.run(CASE.q, paged_cache(CASE)), o, what="o after end_forward")


def test_repr_says_what_is_planned() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "HND", use_tensor_cores=True)
    assert repr(wrapper) == "BatchDecodeWithPagedKVCacheWrapper(HND, nothing planned)"
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled
    assert repr(planned(CASE, pos_encoding_mode="ALIBI")) == (
        "BatchDecodeWithPagedKVCacheWrapper(NHD, 4 requests of up to 48 tokens, 4 query and 2 KV heads of 32, "
        "pages of 16, q float32, kv float32, ALIBI)"
    )


def test_bfloat16_everywhere() -> None:
    cache = build(CacheCase((17, 40), dtype="bfloat16", rank=4, layout="HND"))
    wrapper = planned(cache)
    out = torch.empty(cache.q.shape, dtype=torch.bfloat16)
    wrapper.run(to_kind(cache.q, "torch"), paged_cache(cache, "torch"), out=out)
    assert wrapper.run(cache.q, paged_cache(cache)).dtype == ml_dtypes.bfloat16
    assert_close(as_numpy(out, "out"), oracle(cache, cache.q)[0], rel=1e-2, what="o")
