"""The tests' own instruments: `cases.py` poisons what it says, and each comparison of `compare.py` can fail."""

import numpy as np
import pytest

from support.cases import DTYPES, PAGE_SIZES, CacheCase, build
from support.compare import assert_bits_equal, assert_close, assert_lse_close


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_are_poisoned_outside_their_tokens(dtype, page_size):
    cache = build(CacheCase(lengths=(page_size + 1, 0, 3), page_size=page_size, dtype=dtype, rank=6))
    live = ~np.isnan(cache.k_blocks.astype(np.float32)).all(axis=(-1, -2))  # [pages, 2, layers, page_size]
    assert live[:, :, :-1].sum() == 0
    assert live[:, :, -1].sum() == 2 * sum(cache.case.lengths)
    assert cache.v_blocks is cache.k_blocks


ROW = np.array([[3.0, -4.0, np.nan, np.inf]])


@pytest.mark.parametrize(
    ("actual", "where"),
    [
        ([[3.0, -4.0 - 1e-5, np.nan, np.inf]], r"\(0, 1\): actual -4\.00001, expected -4\.0"),
        ([[3.0, -4.0, np.nan, -np.inf]], r"infinity out of place.*\(0, 3\)"),
        ([[3.0, -4.0, np.nan, 1e30]], r"infinity out of place.*\(0, 3\)"),
        ([[3.0, np.inf, np.nan, np.inf]], r"infinity out of place.*\(0, 1\)"),
        ([[np.nan, -4.0, np.nan, np.inf]], r"NaN out of place.*\(0, 0\)"),
        ([[3.0, -4.0, 0.0, np.inf]], r"NaN out of place.*\(0, 2\)"),
        ([3.0, -4.0, np.nan, np.inf], r"shape \(4,\), expected \(1, 4\)"),
    ],
)
def test_comparisons_show_the_first_mismatch(actual, where):
    for compare in (
        lambda a: assert_close(a, ROW, rel=1e-6, what="o"),
        lambda a: assert_lse_close(a, ROW, tol=1e-6, what="o"),
    ):
        compare(ROW.astype(np.float32))
        with pytest.raises(AssertionError, match=f"o: .*{where}"):
            compare(np.array(actual))


def test_comparison_bounds_the_norm_and_each_element():
    flat = np.ones((2, 100))
    spread, peak = flat.copy(), flat.copy()
    spread[1] += 0.0011
    peak[1, 7] += 0.0021  # a fifth of what the norm alone would allow
    assert_close(flat + 0.0009, flat, rel=1e-3, what="o")
    for wrong in (spread, peak):
        with pytest.raises(AssertionError, match=r"first at \(1, "):
            assert_close(wrong, flat, rel=1e-3, what="o")
    with pytest.raises(AssertionError):
        assert_close(np.full((1, 2), 1e-20), np.zeros((1, 2)), rel=1e-3, what="a row of zeros")


def test_bit_comparison_sees_signs_of_zero_and_dtypes():
    with pytest.raises(AssertionError, match=r"\(1,\): actual -0\.0, expected 0\.0"):
        assert_bits_equal(np.array([1.0, -0.0]), np.array([1.0, 0.0]), what="o")
    with pytest.raises(AssertionError, match="dtype float32, expected float64"):
        assert_bits_equal(np.zeros(1, np.float32), np.zeros(1), what="o")
