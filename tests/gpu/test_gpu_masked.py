"""Masked and latent attention on a GPU against the float64 oracle; tests/gpu/model has more cases of both."""

import numpy as np
import pytest

from gpu.harness import Gpu
from paged_kv import reference
from support import harness, latent
from support.cases import CacheCase, build
from support.compare import assert_close, assert_lse_close

LENGTHS = (700, 0, 33)
REL = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("rope_theta", [None, 1e4])
@pytest.mark.parametrize("dims", [(64, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(("group", "page_size"), [(1, 16), (4, 5), (11, 64)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "o_dtype"),
    [("bfloat16", "bfloat16", "float32"), ("float32",) * 3, ("float16", "float8_e4m3fn", "float16")],
)
def test_masked_attention(dtype, kv_dtype, o_dtype, group, page_size, dims, rope_theta):
    sizes = (LENGTHS, 2 * group, 2)
    keys, values = (build(CacheCase(*sizes, dim, page_size, dtype=kv_dtype)) for dim in dims)
    rng = np.random.default_rng(1)
    row_batch = np.array([0] * 5 + [2] * 4 + [1, -1], np.int32)
    row_lengths = np.array([700, 699, 300, 128, 1, 33, 33, 32, 0, 0, 9], np.int32)
    mask_starts = np.array([0, 13, -1, 700, 3, 800, 900, -1, 0, 0, 0], np.int64)
    mask_firsts = np.array([0, 650, 0, 0, 0, 20, 0, 0, 0, 0, 0], np.int32)
    q = rng.standard_normal((len(row_batch), 2 * group, dims[0]), np.float32).astype(dtype)
    row_masks = {
        "row_positions": row_lengths + rng.integers(0, 50, len(row_batch), np.int32),
        "token_offsets": np.array([7, 0, 40], np.int32),
        "mask": rng.integers(0, 256, 200, np.uint8),
        "mask_starts": mask_starts,
        "mask_firsts": mask_firsts,
        "window_left": 600,
    }
    arrays = q, keys.k_blocks, values.v_blocks, keys.lookup_table, row_batch, row_lengths
    options = {} if rope_theta is None else {"rope_theta": rope_theta}
    o, lse = harness.masked_attention(*arrays, **row_masks, **options, o_dtype=o_dtype, on=Gpu())
    expected, expected_lse = reference.masked_attention(*arrays, **row_masks, **options)
    assert_close(o, expected, rel=REL[dtype], what="o")
    assert_lse_close(lse, expected_lse, tol=1e-4, what="lse")


@pytest.mark.parametrize(("heads", "page_size"), [(1, 1), (6, 64), (128, 16)])
@pytest.mark.parametrize("dims", [(512, 64), (128, 200)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float8_e4m3fn")]
)
def test_latent_attention(dtype, kv_dtype, dims, heads, page_size):
    ckv, kpe = (build(CacheCase(LENGTHS, heads, 1, dim, page_size, dtype=kv_dtype)) for dim in dims)
    rng = np.random.default_rng(3)
    row_batch, row_lengths = np.array([0, 0, 1, 2, -1], np.int32), np.array([700, 699, 0, 33, 5], np.int32)
    q_nope, q_pe = (rng.standard_normal((5, heads, dim), np.float32).astype(dtype) for dim in dims)
    arrays = q_nope, q_pe, ckv.k_blocks[:, :, 0], kpe.k_blocks[:, :, 0], ckv.lookup_table, row_batch, row_lengths
    case = latent.LatentCase(*arrays[2:5], ckv.lengths, *arrays[:2], row_batch, row_lengths)
    o, lse = latent.mla_attention(case, sm_scale=0.05, on=Gpu())
    expected, expected_lse = reference.mla_attention(*arrays, sm_scale=0.05)
    assert_close(o, expected, rel=REL[dtype], what="o")
    assert_lse_close(lse, expected_lse, tol=1e-4, what="lse")
