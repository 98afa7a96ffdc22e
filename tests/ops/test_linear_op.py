"""The linear op against a float64 product: every dtype, every edge of its blocks, any number of threads."""

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, TensorType

from paged_kv.graphs import ops
from support import op_graphs
from support.compare import assert_bits_equal
from support.dtype_pairs import LINEAR_PAIRS as PAIRS
from support.harness import refused

CPU = DeviceRef.CPU()
SUM_ERROR = 2.0**-21
"""A part of the sum of |x||w|: how far a float32 sum may be off, whatever its order."""
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The sum is rounded once, to x's dtype."""
TINIEST = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-24}
"""The step between numbers near 0, where sums are small enough for it to matter."""


def add(count, pair, depth, **options):
    """A graph of x by so many weights; all sizes are symbolic."""
    types = [TensorType(DType[pair[1]], [f"N{i}", depth.format(i)], CPU) for i in range(count)]
    make = (lambda x, *ws: ops.linear_group(x, ws)) if count > 1 else ops.linear
    title = "_".join([f"linear{count}", *pair])
    op_graphs.add(title, make, TensorType(DType[pair[0]], ["M", "K"], CPU), *types, **options)


for pair in PAIRS:
    add(1, pair, "K", by_max="float16" in pair)  # of no step on a CPU: the registered op knows no dtype by its name
    if pair in PAIRS[:4]:
        add(3, pair, "K")
# Depths of two names are compared by the registered op alone.
add(2, ("float32", "float32"), "L{}", by_max=True)


def linear(x, w):
    (y,) = op_graphs.run(f"linear1_{x.dtype.name}_{w.dtype.name}", x, w)
    return y


def linear_group(x, ws):
    return op_graphs.run(f"linear3_{x.dtype.name}_{ws[0].dtype.name}", x, *ws)


def operands(pair, m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape, dtype in zip(((m, k), (n, k)), pair, strict=True))


def expected(x, w):
    return x.astype(np.float64) @ w.astype(np.float64).T


@dataclass(frozen=True)
class Right:
    """`x w^T` in float64, and how far the op may be off."""

    y: np.ndarray
    bound: np.ndarray

    @staticmethod
    def of(x, w):
        e = expected(x, w)
        rounding = np.maximum(ROUNDING[x.dtype.name] * 1.001 * abs(e), TINIEST[x.dtype.name] / 2)
        return Right(e, SUM_ERROR * expected(abs(x), abs(w)) + rounding)


def check(x, w, right=None):
    """`right`: of x and of w, or of more rows of w."""
    right = Right.of(x, w) if right is None else right
    y, e, bound = linear(x, w), right.y[:, : len(w)], right.bound[:, : len(w)]
    assert (y.dtype, y.shape) == (x.dtype, e.shape)
    bad = np.argwhere(~(abs(y.astype(np.float64) - e) <= bound))
    if len(bad):
        at = tuple(bad[0])
        raise AssertionError(f"{x.shape} x {w.shape}: {len(bad)} of {y.size} are off, first {at}: {y[at]}, not {e[at]}")


ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 97, 130)
COLUMNS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100)
DEPTHS = (1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200, 1024)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("m", ROWS)
def test_every_edge(pair, m):
    for k in DEPTHS:
        x, w = operands(pair, m, max(COLUMNS), k, seed=k)
        right = Right.of(x, w)
        for n in COLUMNS:
            check(x, w[:n].copy(), right)  # in memory of its own: what is read past it is not w


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("m", [1, 2, 8, 13, 30, 45, 64, 600])
def test_sizes_of_models(pair, m):
    check(*operands(pair, m, 1280, 2048))
    check(*operands(pair, m, 300, 5632))
    check(*operands(pair, m, 700, 288))
    check(*operands(pair, m, 2100, 640))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("m", [1, 3, 17, 70])
@pytest.mark.parametrize("k", [33, 64])
def test_what_lies_past_the_operands_is_not_used(pair, m, k):
    x, w = operands(pair, m + 1, 51, k)
    x[m], w[50] = np.nan, np.nan
    check(x[:m], w[:50])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 8), (4, 0, 8), (3, 5, 0), (0, 0, 0)])
def test_empty(pair, m, n, k):
    x, w = operands(pair, m, n, k)
    assert_bits_equal(linear(x, w), np.zeros((m, n), x.dtype), what="a product of nothing")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("m", [2, 7, 17, 64, 65, 520])
def test_a_row_alone_gives_the_bits_it_gives_in_company(pair, m):
    x, w = operands(pair, m, 77, 1100)
    together = linear(x, w)
    for row in {0, m // 2, m - 1}:
        assert_bits_equal(together[row : row + 1], linear(x[row : row + 1], w), what=f"row {row} of {m}")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("m", [1, 8, 40])
def test_what_is_not_finite_stays_in_its_row_and_column(pair, m):
    x, w = operands(pair, m, 50, 100)
    w[17, 99], w[20, 0] = np.nan, np.inf
    x[m - 1, 50] = np.nan
    y, e = linear(x, w), expected(x, w)
    assert_bits_equal(np.isnan(y), np.isnan(e), what="NaN")
    assert_bits_equal(np.isinf(y), np.isinf(e), what="infinity")


@pytest.mark.parametrize("pair", PAIRS[:4], ids="-".join)
@pytest.mark.parametrize("m", [0, 1, 2, 3, 8, 17, 70, 600])
def test_a_group_gives_the_bits_of_its_members(pair, m):
    for columns, k in (((512, 128, 128), 640), ((1, 33, 100), 33), ((200, 0, 1), 1100), ((3, 96, 31), 64)):
        x, w = operands(pair, m, sum(columns), k, seed=k)
        ws = [part.copy() for part in np.split(w, np.cumsum(columns)[:-1])]
        for y, member in zip(linear_group(x, ws), ws, strict=True):
            assert_bits_equal(y, linear(x, member), what=f"{columns} columns, the member of {len(member)}")


@pytest.mark.slow
def test_a_group_with_weights_of_another_depth_is_refused():
    x, w = operands(("float32", "float32"), 3, 4, 8)
    with refused("w", 7, 8):
        op_graphs.run("linear2_float32_float32", x, w[:, :7].copy(), w)


def test_float32_rows_keep_their_bits_against_bfloat16_weights():
    """The rows are not rounded to the weights' dtype: a difference of 2^-20 shows."""
    x = np.ones((40, 64), np.float32)
    x[:, 0] += 2.0**-20
    w = np.zeros((33, 64), "bfloat16")
    w[:, 0], w[:, 1] = 1, -1
    assert_bits_equal(linear(x, w), np.full((40, 33), 2.0**-20, np.float32), what="a small difference")
