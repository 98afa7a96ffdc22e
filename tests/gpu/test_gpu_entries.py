"""The other entries of the Python API over torch CUDA tensors, against the same calls over NumPy arrays."""

import numpy as np
import pytest
import torch
from max.driver import Accelerator, Buffer

from paged_kv import cascade, page
from paged_kv.cache import allocate_blocks, append_kv, gather_kv, init_paged_kv_cache
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.page import PagedKVCacheManager
from support.compare import assert_bits_equal, assert_close, assert_lse_close

INDPTR, INDICES, LAST = np.array([0, 2, 2, 5]), np.array([4, 1, 0, 5, 2]), np.array([4, 0, 1])
DENSE = np.array([[4, 1, -1], [3, -1, -1], [0, 5, 2]])


def rows_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def cuda(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()).cuda() for array in arrays]


@pytest.mark.parametrize("head_dim", [24, 64, 128, 136, 512])
@pytest.mark.parametrize(("dtype", "rel"), [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 1e-2)])
def test_rotary_keys(dtype, rel, head_dim):
    """A long request, which is split, and a group that takes several blocks."""
    q, k, v = rows_of(18, head_dim), rows_of(5000, 2, head_dim), rows_of(5000, 2, head_dim) + 1
    narrow = [array.to(getattr(torch, dtype)) for array in cuda(q, k, v)]
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5, "rope_scale": 2.0, "return_lse": True}
    o, lse = single_decode_with_kv_cache(*narrow, **options)
    expected, expected_lse = single_decode_with_kv_cache(*(array.float().cpu().numpy() for array in narrow), **options)
    assert_close(o.float().cpu().numpy(), expected, rel=rel, what="o")
    assert_lse_close(lse.cpu().numpy(), expected_lse, tol=2e-5, what="lse")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merging_states(dtype):
    v, s = rows_of(5, 3, 4, 136), np.random.default_rng(1).uniform(-9, 9, (5, 3, 4)).astype(np.float32)
    s[1, 0], s[2] = -np.inf, -np.inf
    v[1, 0] = np.nan
    rel = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    narrow, sums = cuda(v)[0].to(getattr(torch, dtype)), cuda(s)[0]
    wide = narrow.float().cpu().numpy()
    expected = cascade.merge_states(wide, s)
    found = cascade.merge_states(narrow, sums)
    buffers = cascade.merge_states(Buffer.from_dlpack(narrow), Buffer.from_dlpack(sums))
    assert all(isinstance(array, Buffer) and array.device == Accelerator(0) for array in buffers)
    for merged in (found, [torch.from_dlpack(array) for array in buffers]):
        assert_close(merged[0].float().cpu().numpy(), expected[0], rel=rel, what="v")
        assert_lse_close(merged[1].cpu().numpy(), expected[1], tol=1e-5, what="s")
    mask = np.array([True, False, True, True, False])
    ours = [array[:, 0].copy() for array in (wide, s)]
    theirs = [array[:, 0].clone() for array in (narrow, sums)]
    cascade.merge_state_in_place(*ours, wide[:, 1], s[:, 1], mask)
    cascade.merge_state_in_place(*theirs, narrow[:, 1], sums[:, 1], torch.from_numpy(mask).cuda())
    assert_close(theirs[0].float().cpu().numpy(), ours[0], rel=rel, what="v in place")
    assert_lse_close(theirs[1].cpu().numpy(), ours[1], tol=1e-5, what="s in place")


@pytest.mark.parametrize("indices", ["on the host", "on the GPU"])
def test_ways_to_append(indices):
    def placed(*arrays: np.ndarray) -> list[object]:
        return cuda(*arrays) if indices == "on the GPU" else list(arrays)

    listed = ([np.array(x, np.int32) for x in ([0, 2, -1, 0, 2], [7, 8, 0, 0, 5])], [INDICES, INDPTR, LAST], [])
    last = ([np.array([0, 2, 2, 5])], [INDICES, INDPTR, LAST], [])
    dense = ([], [DENSE, np.array([3, 2, 0])], [4])
    for count, (before, after, sizes) in ((5, listed), (5, last), (3, dense)):
        expected = np.full((6, 2, 4, 2, 8), np.nan, np.float32)
        (found,) = cuda(expected)
        k, v = rows_of(count, 2, 8), rows_of(count, 2, 8) + 1
        page.append_paged_kv_cache(k, v, *before, expected, *after, *sizes)
        page.append_paged_kv_cache(*cuda(k, v), *placed(*before), found, *placed(*after), *sizes)
        assert_bits_equal(found.cpu().numpy(), expected, what="the cache")
    ckv, kpe = np.full((6, 4, 16), np.nan, np.float32), np.full((6, 4, 8), np.nan, np.float32)
    found = cuda(ckv, kpe)
    rows, at = (rows_of(2, 16), rows_of(2, 8)), (np.array([0, 2]), np.array([7, 8]))
    page.append_paged_mla_kv_cache(*rows, *at, ckv, kpe, INDICES, INDPTR, LAST)
    page.append_paged_mla_kv_cache(*cuda(*rows), *placed(*at), *found, *placed(INDICES, INDPTR, LAST))
    for tensor, array in zip(found, (ckv, kpe), strict=True):
        assert_bits_equal(tensor.cpu().numpy(), array, what="a latent cache")


def test_index_arithmetic():
    found = page.get_seq_lens(*cuda(INDPTR, LAST), 4)
    assert found.tolist() == page.get_seq_lens(INDPTR, LAST, 4).tolist()
    offsets = np.array([0, 2, 2, 4])
    for tensor, array in zip(
        page.get_batch_indices_positions(*cuda(offsets), found, 6),
        page.get_batch_indices_positions(offsets, found.cpu().numpy(), 6),
        strict=True,
    ):
        assert tensor.is_cuda
        assert tensor.tolist() == array.tolist()


def test_the_functional_cache_and_the_manager():
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    cache = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda")
    cache, _ = allocate_blocks(cache, sequence_idx=1, num_new_tokens=6, free_block_ids=np.array([5, 2]))
    keys, values = rows_of(6, 2, 8), rows_of(6, 2, 8) - 1
    longer = append_kv(cache, 1, *cuda(keys, values))
    assert not cache.key_pool.any()
    found = gather_kv(longer, 1)
    for tensor, array in zip(found[:2], (keys, values), strict=True):
        assert tensor.is_cuda
        assert_bits_equal(tensor.cpu().numpy(), array.astype(np.float16), what="gathered rows")
    manager = PagedKVCacheManager(5, 4, 2, 8, "float32", device="cuda")
    manager.append("a", *cuda(keys, values))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(np.array([0, 2]), manager.get_page_table("a"), np.array([2]), 2, 2, 8, 4, q_data_type="float32")
    q = rows_of(1, 2, 8)
    o = wrapper.run(*cuda(q), manager.kv_cache)
    assert_close(o[0].cpu().numpy(), single_decode_with_kv_cache(q[0], keys, values), rel=1e-5, what="o")
