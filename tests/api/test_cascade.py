"""Merging attention states: against the oracle's merge, which test_levels.py holds against attention over the union."""

from typing import Any

import numpy as np
import pytest

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.cascade import merge_state, merge_state_in_place, merge_states
from support.cases import DTYPES, normal
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import O_TOLERANCE, to_kind
from support.kinds import PLACED, bytes_of, kind_of, library


def states(n: int, dtype: str = "float32", rows: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """V `[S, n, H, D]` and s `[S, n, H]` over a wide range, with every pattern of empty sides; theirs hold NaN."""
    rng = np.random.default_rng(0)
    v = normal(rng, (rows, n, 3, 16), dtype)
    s = (rng.standard_normal((rows, n, 3)) * 40).astype(np.float32)
    for row in range(min(rows, 2**n)):
        for state in range(n):
            if row >> state & 1:
                s[row, state] = -np.inf
                v[row, state] = np.nan
    return v, s


def assert_state(found: tuple[Any, Any], v: np.ndarray, s: np.ndarray, kind: str) -> None:
    """It is `v` and `s` merged along their second dimension, as the oracle does it."""
    expected = np.zeros((len(v), *v.shape[2:])), np.full((len(v), v.shape[2]), -np.inf)
    for i in range(v.shape[1]):
        expected = reference.merge(*expected, v[:, i].astype(np.float64), s[:, i].astype(np.float64))
    assert {kind_of(array) for array in found} == {library(kind)}
    assert [as_numpy(array, "result").dtype for array in found] == [v.dtype, np.float32]
    assert_close(as_numpy(found[0], "v"), expected[0], rel=O_TOLERANCE[v.dtype.name], what="v")
    assert_lse_close(as_numpy(found[1], "s"), expected[1], tol=1e-6, what="s")


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merges(dtype: str, kind: str) -> None:
    for n in (1, 2, 5):
        v, s = states(n, dtype, rows=33)
        assert_state(merge_states(to_kind(v, kind), to_kind(s, kind)), v, s, kind)
    v, s = states(2, dtype)
    ours, other = ([to_kind(a[:, i].copy(), kind) for a in (v, s)] for i in (0, 1))
    before = bytes_of([ours, other])
    assert_state(merge_state(*ours, *other), v, s, kind)
    assert bytes_of([ours, other]) == before
    merge_state_in_place(*ours, *other)
    assert_state((ours[0], ours[1]), v, s, kind)
    assert bytes_of(other) == before[2:]


@pytest.mark.parametrize("kind", PLACED)
def test_a_mask_keeps_the_bits_of_the_other_rows(kind: str) -> None:
    v, s = states(2)
    ours = [a[:, 0].copy() for a in (v, s)]
    mask = np.array([True, False, True, False, False, True, True])
    merge_state_in_place(*(to_kind(array, kind) for array in (*ours, v[:, 1].copy(), s[:, 1].copy(), mask)))
    assert_state((ours[0][mask], ours[1][mask]), v[mask], s[mask], "numpy")
    for array, original in zip(ours, (v, s), strict=True):
        assert_bits_equal(array[~mask], original[~mask, 0], what="a row outside the mask")


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("shape", [(4, 0, 3, 8), (0, 2, 3, 8), (2, 3, 4, 0)], ids=str)
def test_nothing_is_merged(shape: tuple[int, ...], kind: str) -> None:
    v, s = merge_states(*(to_kind(np.zeros(size, np.float32), kind) for size in (shape, shape[:-1])))
    assert (v.shape, s.shape) == ((shape[0], *shape[2:]), (shape[0], shape[2]))
    assert not as_numpy(v, "v").any()
    assert np.allclose(as_numpy(s, "s"), np.log2(shape[1]) if shape[1] else -np.inf)
