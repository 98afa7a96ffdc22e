"""Prefill and mixed batches on a GPU, without one: torch tensors on the CPU stand in, the host's results are expected.

What only a GPU can show (streams, kernels) is in tests/gpu; the kernels run in tests/gpu_sim.
"""

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv import prefill
from paged_kv.attention import BatchAttention
from paged_kv.errors import ContractTypeError
from support import harness
from support.cases import CacheCase, build
from support.compare import assert_bits_equal
from support.stand_in import OnGpu, csr, stand_in, storage_of, tensors

__all__ = ["stand_in"]  # the fixture

pytestmark = pytest.mark.usefixtures("stand_in")

CASE = CacheCase((20, 0, 7), 4, 2, 16, 4, rank=5)
QO_INDPTR = np.array([0, 5, 5, 8])
SIZES = (CASE.num_q_heads, CASE.num_kv_heads, CASE.head_dim)
MASK = np.random.default_rng(5).random(5 * 20 + 3 * 7) < 0.5


@pytest.fixture(autouse=True)
def one_compile():
    harness.runtime()


def queries(dim: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((8, 4, dim), np.float32)


def check(found: Any, expected: Any) -> None:
    """O and lse are torch tensors, to the bit those of the same call over NumPy arrays."""
    for what, one, other in zip(("o", "lse"), found, expected, strict=True):
        assert isinstance(one, torch.Tensor)
        assert_bits_equal(one.numpy(), other, what=what)


@pytest.mark.parametrize(
    "options",
    [{"causal": True, "window_left": 6}, {"custom_mask": MASK, "logits_soft_cap": 3.0}, {"head_dim_vo": 8}],
    ids=["causal", "mask", "narrow V"],
)
def test_paged_prefill(options):
    cache = build(CASE)
    width = options.get("head_dim_vo", CASE.head_dim)
    pages = cache.k_blocks[:, 0], cache.k_blocks[:, 1, ..., :width]
    results = []
    for q, storage in ((tensors(queries(16)), tuple(map(tensors, pages))), (queries(16), pages)):
        wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(None)
        wrapper.plan(QO_INDPTR, *csr(cache), *SIZES, CASE.page_size, q_data_type="float32", **options)
        results.append(wrapper.run(q, storage, v_scale=0.5, return_lse=True, lse_layout="HN", lse_base="ln"))
    check(*results)
    assert np.isfinite(results[1][0]).all()


def test_paged_prefill_into_given_tensors():
    cache = build(CASE)
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(QO_INDPTR, *csr(cache), *SIZES, CASE.page_size, causal=True, q_data_type="float32")
    out, lse = torch.full((8, 4, 16), torch.nan), torch.full((8, 4), torch.nan)
    found = wrapper.run(tensors(queries(16)), storage_of(cache), out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    check(found, wrapper.run(queries(16), cache.k_blocks, return_lse=True))


def test_ragged_and_single_prefill():
    rng = np.random.default_rng(7)
    k, v = (rng.standard_normal((27, 2, dim), np.float32) for dim in (24, 8))
    arrays = queries(24), k, v
    results = []
    for q, keys, values in (tuple(map(tensors, arrays)), arrays):
        wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(None)
        wrapper.plan(QO_INDPTR, np.array([0, 20, 20, 27]), 4, 2, 24, 8, causal=True, q_data_type="float32")
        one = prefill.single_prefill_with_kv_cache(q, keys, values, custom_mask=np.tri(8, 27) > 0, return_lse=True)
        results.append([*wrapper.run(q, keys, values, return_lse=True), *one])
    check(results[0][:2], results[1][:2])
    check(results[0][2:], results[1][2:])


def test_a_mixed_batch():
    cache = build(CASE)
    indptr, indices, _ = csr(cache)
    results = []
    for q, storage in ((tensors(queries(16)), storage_of(cache)), (queries(16), cache.k_blocks)):
        wrapper = BatchAttention()
        sizes = (4, 2, 16, 16, CASE.page_size)
        wrapper.plan(QO_INDPTR, indptr, indices, cache.lengths, *sizes, True, None, None, "float32", "float32")
        results.append(wrapper.run(q, storage))
    check(*results)


def test_a_mask_on_a_gpu_is_refused():
    """Its bits are packed on the host, as the page table is made there."""
    cache = build(CASE)
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(None)
    for name in ("custom_mask", "packed_custom_mask"):
        with pytest.raises(ContractTypeError, match=f"{name} is on a GPU.*packed on the host"):
            wrapper.plan(QO_INDPTR, *csr(cache), *SIZES, CASE.page_size, q_data_type="float32", **{name: OnGpu()})
