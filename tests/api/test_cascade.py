"""Merging attention states: against the oracle's merge, and against attention over the union of the keys."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.cascade import merge_state, merge_state_in_place, merge_states
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from support.cases import DTYPES, normal
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import O_TOLERANCE, to_kind
from support.kinds import WRITABLE, bytes_of, kind_of


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
    assert [kind_of(array) for array in found] == [kind, kind]
    assert_close(v, expected[0], rel=O_TOLERANCE[dtype], what="v")
    assert_lse_close(s, expected[1], tol=1e-6, what="s")


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_states(dtype: str, kind: str) -> None:
    v, s = states(2, dtype)
    arguments = [to_kind(np.ascontiguousarray(a), kind) for a in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    before = bytes_of(arguments)
    assert_state(merge_state(*arguments), merged_by_oracle(v, s), dtype, kind)
    assert bytes_of(arguments) == before


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_many_states(n: int, dtype: str, kind: str) -> None:
    v, s = states(n, dtype, rows=33)
    assert_state(merge_states(to_kind(v, kind), to_kind(s, kind)), merged_by_oracle(v, s), dtype, kind)


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype: str, kind: str) -> None:
    v, s = states(2, dtype)
    ours, other = ([to_kind(a[:, i].copy(), kind) for a in (v, s)] for i in (0, 1))
    before = bytes_of(other)
    merge_state_in_place(*ours, *other)
    assert_state((ours[0], ours[1]), merged_by_oracle(v, s), dtype, kind)
    assert bytes_of(other) == before


@pytest.mark.parametrize("kind", WRITABLE)
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


V, S = np.zeros((5, 3, 16), np.float32), np.zeros((5, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((V[0], S, V, S), ShapeError, "v_a: shape [3, 16], expected [S, H, D]"),
        ((V, S[:4], V, S), ShapeError, "s_a: shape [4, 3], expected [5, 3]"),
        ((V, S, V, S[..., None]), ShapeError, "s_b: shape [5, 3, 1], expected [5, 3]"),
        ((V, S, V[:4], S[:4]), ShapeError, "v_b: shape [4, 3, 16] differs from v_a's [5, 3, 16]"),
        ((V, S, V.astype(np.float16), S), ContractTypeError, "v_b: dtype float16 differs from v_a's float32"),
        ((V.astype(np.int32), S, V, S), ContractTypeError, "v_a: dtype int32 is none of"),
        ((V, S.astype(np.float64), V, S), ContractTypeError, "s_a: dtype float64, expected float32"),
        ((V.astype(ml_dtypes.float8_e5m2), S, V, S), ContractTypeError, "v_a: dtype float8_e5m2 is none of"),
        (([1.0], S, V, S), ContractTypeError, "v_a must be an array"),
        (
            (np.broadcast_to(np.float32(0), (5, 3, 2**31)), S, V, S),
            ShapeError,
            "v_a: head_dim is 2147483648, over 65536",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        merge_state(*arguments)
    renamed = message.replace("v_a", "v").replace("s_a", "s").replace("v_b", "v_other").replace("s_b", "s_other")
    with pytest.raises(error, match=re.escape(renamed)):
        merge_state_in_place(*arguments)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones(5, np.int32), ContractTypeError, "mask: dtype int32, expected bool"),
        (np.ones(4, np.bool_), ShapeError, "mask: shape [4], expected [5]"),
    ],
)
def test_masks_that_do_not_fit(mask: np.ndarray, error: type[Exception], message: str) -> None:
    v, s = np.ones_like(V), np.ones_like(S)
    before = bytes_of([v, s])
    with pytest.raises(error, match=re.escape(message)):
        merge_state_in_place(v, s, V, S, mask)
    assert bytes_of([v, s]) == before


@pytest.mark.parametrize("name", ["v", "s"])
def test_read_only_arrays_cannot_be_merged_into(name: str) -> None:
    ours = {"v": np.ones_like(V), "s": np.ones_like(S)}
    ours[name].setflags(write=False)
    before = bytes_of([*ours.values()])
    with pytest.raises(ContractError, match=f"^{name} is read-only"):
        merge_state_in_place(**ours, v_other=V, s_other=S)
    assert bytes_of([*ours.values()]) == before


def test_many_states_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=re.escape("v: shape [5, 3, 16], expected [S, n, H, D]")):
        merge_states(V, S)
