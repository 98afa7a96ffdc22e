"""Merging attention states: against the oracle's merge, and against attention over the union of the keys."""

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


def states(n: int, dtype: str = "float32", rows: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """V `[S, n, H, D]` and s `[S, n, H]` over a wide range, with every pattern of empty sides; theirs hold NaN."""
    rng = np.random.default_rng(seed)
    v = normal(rng, (rows, n, 3, 16), dtype)
    s = (rng.standard_normal((rows, n, 3)) * 40).astype(np.float32)
    for row in range(min(rows, 2**n)):
        for state in range(n):
            if row >> state & 1:
                s[row, state] = -np.inf
                v[row, state] = np.nan
    return v, s


def merged_by_oracle(v: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    o, lse = np.zeros((len(v), *v.shape[2:])), np.full((len(v), v.shape[2]), -np.inf)
    for i in range(v.shape[1]):
        o, lse = reference.merge(o, lse, v[:, i].astype(np.float64), s[:, i].astype(np.float64))
    return o, lse


def assert_state(found: tuple[Any, Any], expected: tuple[np.ndarray, np.ndarray], dtype: str, kind: str) -> None:
    v, s = (as_numpy(array, "result") for array in found)
    assert v.dtype == np.dtype(dtype)
    assert s.dtype == np.float32
    assert [kind_of(array) for array in found] == [library(kind)] * 2
    assert_close(v, expected[0], rel=O_TOLERANCE[dtype], what="v")
    assert_lse_close(s, expected[1], tol=1e-6, what="s")


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_states(dtype: str, kind: str) -> None:
    v, s = states(2, dtype)
    arguments = [to_kind(np.ascontiguousarray(a), kind) for a in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    before = bytes_of(arguments)
    assert_state(merge_state(*arguments), merged_by_oracle(v, s), dtype, kind)
    assert bytes_of(arguments) == before


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_many_states(n: int, dtype: str, kind: str) -> None:
    v, s = states(n, dtype, rows=33)
    assert_state(merge_states(to_kind(v, kind), to_kind(s, kind)), merged_by_oracle(v, s), dtype, kind)


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype: str, kind: str) -> None:
    v, s = states(2, dtype)
    ours, other = ([to_kind(a[:, i].copy(), kind) for a in (v, s)] for i in (0, 1))
    before = bytes_of(other)
    merge_state_in_place(*ours, *other)
    assert_state((ours[0], ours[1]), merged_by_oracle(v, s), dtype, kind)
    assert bytes_of(other) == before


@pytest.mark.parametrize("kind", PLACED)
def test_a_mask_keeps_the_bits_of_the_other_rows(kind: str) -> None:
    v, s = states(2)
    ours = [a[:, 0].copy() for a in (v, s)]
    mask = np.array([True, False, True, False, False, True, True])
    arguments = [to_kind(array, kind) for array in (*ours, v[:, 1].copy(), s[:, 1].copy(), mask)]
    merge_state_in_place(*arguments)
    expected = merged_by_oracle(v, s)
    assert_close(ours[0][mask], expected[0][mask], rel=1e-6, what="v")
    assert_lse_close(ours[1][mask], expected[1][mask], tol=1e-6, what="s")
    for array, original in zip(ours, (v, s), strict=True):
        assert_bits_equal(array[~mask], original[~mask, 0], what="a row outside the mask")


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("shape", [(4, 0, 3, 8), (0, 2, 3, 8), (2, 3, 4, 0)], ids=str)
def test_nothing_is_merged(shape: tuple[int, ...], kind: str) -> None:
    v, s = merge_states(*(to_kind(np.zeros(size, np.float32), kind) for size in (shape, shape[:-1])))
    assert (v.shape, s.shape) == ((shape[0], *shape[2:]), (shape[0], shape[2]))
    assert not as_numpy(v, "v").any()
    assert np.allclose(as_numpy(s, "s"), np.log2(shape[1]) if shape[1] else -np.inf)


def test_it_is_attention_over_the_union() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 4, 8), (1, 48, 2, 8), (1, 48, 2, 8)))

    def attend(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        table = np.zeros((1, 1), np.uint32)
        o, lse = reference.attention(q, k[:, begin:end], v[:, begin:end], table, np.array([0]), np.array([end - begin]))
        return o.astype(np.float32), lse.astype(np.float32)

    o, lse = merge_state(*attend(0, 17), *attend(17, 48))
    whole = attend(0, 48)
    assert_close(o, whole[0], rel=1e-6, what="o")
    assert_lse_close(lse, whole[1], tol=1e-6, what="lse")
    parts = [attend(begin, begin + 12) for begin in range(0, 48, 12)]
    o, lse = merge_states(*(np.stack(arrays, axis=1) for arrays in zip(*parts, strict=True)))
    assert_close(o, whole[0], rel=1e-6, what="o")
    assert_lse_close(lse, whole[1], tol=1e-6, what="lse")
