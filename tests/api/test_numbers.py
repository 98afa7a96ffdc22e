"""Numbers at the ends of what the calls take: options against the oracle, and rows that become float8."""

import ml_dtypes
import numpy as np
import pytest
import torch

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.cache import allocate_blocks, append_kv, gather_kv, init_paged_kv_cache
from paged_kv.cascade import merge_state
from support.cases import CacheCase, build
from support.compare import assert_close, assert_lse_close
from support.decoding import assert_decodes, paged_cache, planned
from support.kinds import make

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 1, 300), num_q_heads=4, num_kv_heads=2, head_dim=64))
LEAST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@pytest.mark.parametrize("sm_scale", [1.0, 1e-6, 1e30])
@pytest.mark.parametrize("cap", [LEAST, 1e-35, 1e-6, 50.0, 1e6, 1e20, 1e35, 2e38, LARGEST])
def test_every_soft_cap(cap, sm_scale):
    """Above all scores it is none, far below them all scores are equal or opposite."""
    options = {"logits_soft_cap": cap, "sm_scale": float(np.float32(sm_scale))}
    found = planned(CASE, **options).run_return_lse(CASE.q, paged_cache(CASE))
    assert_decodes(found, CASE, **options | {"logits_soft_cap": float(np.float32(cap))})


@pytest.mark.parametrize(
    ("theta", "scale"),
    [(1e-3, 1.0), (1.0, 1e-3), (0.1, 0.011), (1e-30, 1e30), (1.0, 1.0), (1e30, 1.0), (LARGEST, 1.0), (1e4, LARGEST)],
)
def test_every_rotation(theta, scale):
    rope = {"rope_theta": float(np.float32(theta)), "rope_scale": float(np.float32(scale))}
    found = planned(CASE, pos_encoding_mode="ROPE_LLAMA", **rope).run_return_lse(CASE.q, paged_cache(CASE))
    assert_decodes(found, CASE, "ROPE_LLAMA", **rope)


@pytest.mark.parametrize("scales", [{"q_scale": 1e30, "k_scale": 1e-30}, {"v_scale": 1e-30}, {"v_scale": 1e38}])
def test_scales_at_the_ends(scales):
    found = planned(CASE).run_return_lse(CASE.q, paged_cache(CASE), **scales)
    assert_decodes(found, CASE, **{name: float(np.float32(value)) for name, value in scales.items()})


def test_what_is_no_normal_number_is_zero():
    """In a result, and so in the options, which are refused there."""
    o, lse = planned(CASE).run_return_lse(CASE.q, paged_cache(CASE), v_scale=LEAST)
    expected, _ = reference.attention(CASE.q, *CASE.pages, *CASE.decode_rows, v_scale=LEAST)
    assert np.isfinite(lse).all()
    is_normal = np.abs(expected) > 1.001 * LEAST
    assert 0 < is_normal.sum() < is_normal.size
    np.testing.assert_allclose(o[is_normal], expected[is_normal], rtol=1e-5)
    assert not o[np.abs(expected) < 0.999 * LEAST].any()


def test_scores_and_values_past_float32():
    """Through the public call: the formula in float64, rounded."""
    wrapper = planned(CASE)
    q = CASE.q * np.float32(1e30)
    k, v = (np.where(np.isnan(blocks), np.nan, blocks) for blocks in (CASE.k_blocks, CASE.v_blocks))
    k = k * np.float32(1e30)
    v = np.where(np.isnan(v), np.nan, np.sign(v) * np.float32(3.3e38))
    o = wrapper.run(q, (k, v))
    with np.errstate(over="ignore"):
        expected, _ = reference.attention(q, k, v, CASE.lookup_table, *CASE.decode_rows)
    assert_close(o, expected, rel=1e-5, what="o")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merging_values_past_float32(dtype):
    value = {"float16": 6e4}.get(dtype, 3e38)
    v = np.full((3, 2, 16), value).astype(dtype)
    s = np.array([[0, 5], [-3, 3e38], [100, -np.inf]], np.float32)
    merged, lse = merge_state(v, s, v, np.zeros((3, 2), np.float32))
    assert_close(merged, v.astype(np.float64), rel=1e-6, what="v")
    zeros = np.zeros((3, 2, 1))
    assert_lse_close(lse, reference.merge(zeros, s, zeros, 0 * zeros[..., 0])[1], tol=1e-6, what="lse")


NUMBERS = [0, 0.3, -1, 447, 448, -448, 449, 464, 464.5, 465, 480, 500, -1e4, 57344, 6e4, 61439, 61441, 65536, -1e30]
NUMBERS += [np.inf, -np.inf, np.nan, 2.0**-9, 2.0**-10, 1.1 * 2**-10, 2.0**-16, 2.0**-17]


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16", "float16"])
def test_rows_become_float8_as_torch_converts_them(rows_dtype, dtype, kind):
    """float8_e4m3fn saturates, infinity included; float8_e5m2 has infinity past 61440; NaN stays NaN."""
    numbers = torch.tensor(NUMBERS, dtype=torch.float64).to(getattr(torch, rows_dtype))
    expected = numbers.to(getattr(torch, dtype)).float().numpy()
    cache = init_paged_kv_cache(
        num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, batch_size=1, max_blocks_per_seq=8, dtype=dtype
    )
    cache, _ = allocate_blocks(cache, sequence_idx=0, num_new_tokens=len(NUMBERS), free_block_ids=np.arange(8))
    rows = as_numpy(numbers, "numbers")[:, None, None].repeat(8, 2)
    keys, values, _ = gather_kv(append_kv(cache, 0, make(kind, rows), make(kind, rows)), 0)
    for found in keys, values:
        assert found.dtype == getattr(ml_dtypes, dtype)
        np.testing.assert_array_equal(found[:, 0, 5].astype(np.float32), expected)
    if dtype == "float8_e4m3fn":
        assert np.abs(expected[np.isfinite(NUMBERS)]).max() == 448
        assert expected[NUMBERS.index(np.inf)] == 448
