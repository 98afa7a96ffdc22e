"""The ops over rows of activations against NumPy float64: norms, rotation, tables, sums, gated units, chosen rows."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.graph import ops as of_max

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import ops
from support import op_graphs
from support.compare import assert_bits_equal

CPU = DeviceRef.CPU()
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = {"float32": 1e-6, "bfloat16": 3 * 2**-8, "float16": 3 * 2**-11}
"""Relative to the largest element of a row: three roundings."""
EPS, OFFSET, FACTOR = 1e-5, 1.0, 0.22
AMPLITUDE, START = 1.25, 40
FREQUENCIES = (10000.0 ** -(np.arange(20) / 20)).astype(np.float32)
STRETCHED = (FREQUENCIES / np.float32(4)).astype(np.float32)
HADAMARD_DIMS = {"float32": (8, 16, 32, 128, 256, 512), "bfloat16": (64, 128), "float16": (128,)}
MORE_ACTIVATIONS = ("sigmoid", "relu", "none")
SIZES = [(1, 1), (1, 8), (3, 17), (7, 64), (307, 200)]


BY_MAX = ("float16",)
"""No step on a CPU has it; so the registered ops, which know no dtype by its name, are run too."""


def kind(dtype, *shape):
    return TensorType(DType[dtype], shape, CPU)


def columns_of(x):
    return ops.take_columns(x, 2, 3, groups=4), *ops.split_columns(x, [1, 19, 8])


def add(title, *rest, dtype="float32"):
    op_graphs.add(f"layer_{title}", *rest, by_max=dtype in BY_MAX)


for dtype in DTYPES:
    of_dtype = partial(add, dtype=dtype)
    x, weight, heads, table = (
        kind(dtype, "T", "D"), kind(dtype, "D"), kind(dtype, "T", "H", "D"), kind("float32", "T", "C")
    )  # fmt: skip
    of_dtype(f"take_{dtype}", ops.take_rows, x, kind("int32", "N"))
    for name, options in (("plain", {}), ("offset", {"offset": OFFSET}), ("once", {"rounds_once": True})):
        of_dtype(f"norm_{name}_{dtype}", partial(ops.rms_norm, eps=EPS, **options), x, weight)
    of_dtype(f"norm_heads_{dtype}", partial(ops.rms_norm, eps=EPS), heads, weight)
    for name, pairs in (("rotate", False), ("rotate_pairs", True)):
        of_dtype(f"{name}_{dtype}", partial(ops.rotate, pairs=pairs), heads, table, table)
    for dim in HADAMARD_DIMS[dtype]:
        of_dtype(f"hadamard_{dim}_{dtype}", ops.hadamard, kind(dtype, "T", "H", dim))
    of_dtype(f"add_{dtype}", partial(ops.add_scaled, factor=FACTOR), x, x)
    for activation in ("silu", "gelu_tanh"):
        of_dtype(f"{activation}_{dtype}", partial(ops.gate_units, activation=activation), x, x)
    op_graphs.add(f"layer_widen_{dtype}", ops.widened, x, by_max=dtype != "bfloat16")  # of float32 there is no op
for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
    norm = partial(ops.rms_norm, eps=EPS, offset=OFFSET)
    op_graphs.add(
        f"layer_norm_offset_{dtype}_{other}", norm, kind(dtype, "T", "D"), kind(other, "D"), by_max=dtype == "float32"
    )
for activation in MORE_ACTIVATIONS:
    gates = partial(ops.gate_units, activation=activation)
    add(f"{activation}_bfloat16", gates, *[kind("bfloat16", "T", "D")] * 2)
gates = partial(ops.gate_units, activation="sigmoid")
add("gate_rows_bfloat16", gates, kind("bfloat16", "T", 1), kind("bfloat16", "T", "D"))
for dtype in ("float32", "bfloat16"):
    add(f"columns_{dtype}", columns_of, kind(dtype, "T", 28))
add("take_heads_float32", ops.take_rows, kind("float32", "T", 2, 3), kind("int32", "N"))
tables = partial(ops.rotary_tables, frequencies=FREQUENCIES, amplitude=AMPLITUDE, past=(START, STRETCHED))
add("tables", tables, kind("int32", "T"))
add(
    "step_rows",
    lambda positions, offsets, requests: ops.lengths_and_last_rows(positions, offsets, requests.shape[0]),
    *(kind("int32", "T"), kind("uint32", "O"), kind("uint32", "B")),
)

UNARY = {
    "tanh": np.tanh,
    "floor": np.floor,
    "log1p": np.log1p,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum}
"""MAX's own ops between ours, which a program computes with kernels of this package."""
for name in UNARY:
    add(name, getattr(of_max, name), kind("float32", "T", "D"))
for name in BINARY:
    add(name, getattr(of_max, name), kind("float32", "T", "D"), kind("float32", "D"))


def execute(name, *arrays):
    results = op_graphs.run(f"layer_{name}", *arrays)
    return results[0] if len(results) == 1 else results


def sample(dtype, *shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def assert_near(found, exact, dtype):
    assert found.dtype == np.dtype(dtype)
    assert found.shape == exact.shape
    bound = TOLERANCE[np.dtype(dtype).name] * np.abs(exact).max(axis=-1, keepdims=True)
    assert (np.abs(found.astype(np.float64) - exact) <= bound + 1e-30).all()


def assert_rounded_once(found, exact, slack):
    """Nothing was rounded to the dtype before the result: `slack` is the error of arithmetic in float32."""
    half = np.spacing(np.abs(found)).astype(np.float64) / 2
    assert (np.abs(found.astype(np.float64) - exact) <= half + slack).all()


def assert_mostly_equal(found, expected):
    """To the bit, but for where the error of arithmetic in float32 decides a tie."""
    assert (found == expected).mean() > 0.98


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_rows_are_taken_to_the_bit(dtype, shape):
    x = sample(dtype, *shape)
    rows = np.random.default_rng(1).integers(0, shape[0], 2 * shape[0]).astype(np.int32)
    assert_bits_equal(execute(f"take_{dtype}", x, rows), x[rows], what="y")
    assert execute(f"take_{dtype}", x, rows[:0]).shape == (0, shape[1])


def test_rows_of_heads_are_taken():
    x = sample("float32", 5, 2, 3)
    rows = np.array([4, 0, 4], np.int32)
    assert_bits_equal(execute("take_heads_float32", x, rows), x[rows], what="y")


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("row", [-1, 3, 2**31 - 1])
def test_a_row_that_is_not_there_is_refused(row, at):
    rows = np.array([2, 0, 2], np.int32)
    rows[at] = row
    with pytest.raises(ValueError, match=f"rows: entry {at} is {row}, x has 3 rows"):
        execute("take_float32", sample("float32", 3, 4), rows)


def test_a_row_is_found_past_4_gib():
    """Write a page of an array that is 4 GiB of addresses, of which one page is ever written."""
    x = np.zeros((2**28 + 8, 4), np.float32)
    x[2**28 + 5] = 1, 2, 3, 4
    assert_bits_equal(execute("take_float32", x, np.array([2**28 + 5], np.int32)), x[-3:-2], what="y")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "offset", "once"])
@pytest.mark.parametrize("shape", SIZES)
def test_norms(dtype, name, shape):
    x, weight = sample(dtype, *shape), sample(dtype, shape[1], seed=1)
    found = execute(f"norm_{name}_{dtype}", x, weight)
    x64, weight64 = wide(x, weight)
    exact = (weight64 + (OFFSET if name == "offset" else 0)) * x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)
    assert_near(found, exact, dtype)
    if name == "once":
        assert_rounded_once(found, exact, 2e-6 * np.abs(exact))
    elif dtype != "float32" and found.size > 1000:  # before the weight, and after it
        scaled = (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)).astype(dtype).astype(np.float32)
        offset_weight = (weight + np.array(OFFSET if name == "offset" else 0, dtype)).astype(np.float32)
        assert_mostly_equal(found, (offset_weight * scaled).astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "of_weight"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_weight_is_rounded_to_its_own_dtype_and_to_that_of_the_norm(dtype, of_weight):
    x, weight = sample(dtype, 50, 40), sample(of_weight, 40, seed=1)
    x64 = x.astype(np.float64)
    scaled = (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)).astype(dtype).astype(np.float32)
    offset_weight = (weight + np.array(OFFSET, of_weight)).astype(dtype).astype(np.float32)
    found = execute(f"norm_offset_{dtype}_{of_weight}", x, weight)
    assert_near(found, np.float64(offset_weight) * scaled, dtype)
    if dtype != "float32":
        assert_mostly_equal(found, (offset_weight * scaled).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("column", [2, 16])
def test_a_norm_of_what_is_not_finite_says_so_in_its_row_alone(column, dtype):
    x = sample(dtype, 3, 17)
    before = execute(f"norm_plain_{dtype}", x, np.ones(17, dtype))
    for value in (np.nan, np.inf):
        x[1, column] = value
        found = execute(f"norm_plain_{dtype}", x, np.ones(17, dtype))
        assert np.isnan(found[1] if np.isnan(value) else found[1, column]).all()
        assert_bits_equal(found[::2], before[::2], what="the other rows")


@pytest.mark.slow
def test_a_norm_squares_the_greatest_float16_numbers():
    x = np.full((1, 40), 60_000, np.float16)
    assert_bits_equal(execute("norm_plain_float16", x, np.ones(40, np.float16)), np.ones_like(x), what="y")


def test_a_norm_of_a_quiet_row_is_finite():
    x = np.zeros((2, 24), np.float32)
    x[1] = 1e-20
    assert_bits_equal(execute("norm_plain_float32", x, np.ones(24, np.float32))[0], x[0], what="y")
    assert np.isfinite(execute("norm_plain_float32", x, np.ones(24, np.float32))).all()


def test_a_norm_of_heads_is_that_of_its_rows():
    x, weight = sample("bfloat16", 3, 2, 40), sample("bfloat16", 40, seed=1)
    rows = execute("norm_plain_bfloat16", x.reshape(6, 40), weight)
    assert_bits_equal(execute("norm_heads_bfloat16", x, weight), rows.reshape(x.shape), what="y")


@pytest.mark.parametrize("name", ["rotate", "rotate_pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "half"), [(1, 1, 8, 4), (3, 2, 40, 20), (5, 3, 40, 7), (200, 8, 64, 32)]
)
def test_rotation(name, dtype, rows, heads, dim, half):
    x, angles = sample(dtype, rows, heads, dim), sample("float32", rows, half, seed=1)
    cos, sin = np.cos(angles), np.sin(angles)
    found = execute(f"{name}_{dtype}", x, cos, sin)
    x64, cos64, sin64 = wide(x, cos[:, None], sin[:, None])
    a, b = x64[..., :half], x64[..., half : 2 * half]
    if name == "rotate_pairs":
        a, b = x64[..., : 2 * half : 2], x64[..., 1 : 2 * half : 2]
    exact = np.concatenate([a * cos64 - b * sin64, b * cos64 + a * sin64, x64[..., 2 * half :]], -1)
    assert_near(found, exact, dtype)
    assert_rounded_once(found, exact, 1e-6 * np.abs(x64).max())
    assert_bits_equal(found[..., 2 * half :], x[..., 2 * half :], what="the dimensions that are not rotated")


@pytest.mark.parametrize("at", [2, 17, 20, 38, 39])
def test_a_nan_is_rotated_into_its_pair_alone(at):
    x, table = sample("bfloat16", 1, 2, 40), sample("float32", 1, 19)
    x[0, 1, at] = np.nan
    found = np.isnan(execute("rotate_bfloat16", x, table, table))
    assert np.flatnonzero(found[0, 1]).tolist() == ([at % 19, at % 19 + 19] if at < 38 else [at])
    assert not found[0, 0].any()


@pytest.mark.parametrize(("dtype", "dim"), [(dtype, dim) for dtype, dims in HADAMARD_DIMS.items() for dim in dims])
def test_the_hadamard_transform_of_heads(dtype, dim):
    """Sylvester's matrix: entry `[i, j]` is -1 to the number of bits that i and j have in common."""
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / np.sqrt(dim)
    for rows, heads in ((1, 1), (3, 2), (200, 3)):
        x = sample(dtype, rows, heads, dim)
        found = execute(f"hadamard_{dim}_{dtype}", x)
        assert_near(found, x.astype(np.float64) @ matrix, dtype)
        assert_rounded_once(found, x.astype(np.float64) @ matrix, 1e-6 * np.abs(x).max().astype(np.float64))
        assert_near(execute(f"hadamard_{dim}_{dtype}", found), x.astype(np.float64), dtype)


def test_a_nan_is_transformed_within_its_head():
    x = sample("bfloat16", 2, 2, 64)
    before = execute("hadamard_64_bfloat16", x)
    x[1, 0, 5] = np.nan
    found = execute("hadamard_64_bfloat16", x)
    assert np.isnan(found[1, 0]).all()
    assert_bits_equal(found[0], before[0], what="the other row")
    assert_bits_equal(found[1, 1], before[1, 1], what="the other head")


@pytest.mark.parametrize("dim", [8, 9])
def test_a_table_wider_than_half_a_head_is_refused(dim):
    table = sample("float32", 2, 5)
    with pytest.raises(ValueError, match=f"cos: its 5 columns are too many for heads of {dim}"):
        execute("rotate_float32", sample("float32", 2, 1, dim), table, table)


def test_tables_change_where_the_original_context_ends():
    positions = np.array([0, 1, START - 1, START, 4000, 100_000], np.int32)
    found = execute("tables", positions)
    angles = np.where(
        (positions >= START)[:, None], positions[:, None] * STRETCHED, positions[:, None] * FREQUENCIES
    ).astype(np.float32)  # as the op has them, in float32
    for table, function in zip(found, (np.cos, np.sin), strict=True):
        assert np.abs(table - AMPLITUDE * function(angles.astype(np.float64))).max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_sums_round_the_product_and_then_the_sum(dtype, shape):
    x, y = sample(dtype, *shape), sample(dtype, *shape, seed=1)
    product = (y.astype(np.float32) * np.float32(FACTOR)).astype(dtype)
    found, expected = execute(f"add_{dtype}", x, y), (x.astype(np.float32) + product.astype(np.float32)).astype(dtype)
    if dtype == "float32":  # the product may not be rounded: a multiplication and an addition in one instruction
        assert_rounded_once(found, np.float64(np.float32(FACTOR)) * y + x, np.spacing(np.abs(product)))
    else:
        assert_bits_equal(found, expected, what="sum")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_units(activation, dtype, shape):
    gate, up = sample(dtype, *shape), sample(dtype, *shape, seed=1)
    found = execute(f"{activation}_{dtype}", gate, up)
    x, up64 = wide(gate, up)
    active = x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        active = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    assert_near(found, active * up64, dtype)
    if dtype != "float32" and found.size > 1000:  # the activation is rounded, and then the product
        assert_mostly_equal(found, (active.astype(dtype).astype(np.float32) * up.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("activation", [*MORE_ACTIVATIONS, "gate_rows"])
def test_other_gates(activation):
    gate = sample("bfloat16", 50, 1 if activation == "gate_rows" else 37)
    up = sample("bfloat16", 50, 37, seed=1)
    x, up64 = wide(gate, up)
    active = {"relu": np.maximum(x, 0), "none": x}.get(activation, 1 / (1 + np.exp(-x)))
    assert_near(execute(f"{activation}_bfloat16", gate, up), active * up64, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_are_taken_to_the_bit(dtype):
    x = sample(dtype, 70, 28)
    found = execute(f"columns_{dtype}", x)
    groups = x.reshape(70, 4, 7)[:, :, 2:5].reshape(70, 12)
    for part, expected in zip(found, (groups, x[:, :1], x[:, 1:20], x[:, 20:]), strict=True):
        assert_bits_equal(part, np.ascontiguousarray(expected), what="y")


@pytest.mark.parametrize(("first", "width", "groups"), [(0, 8, 4), (-1, 2, 1), (20, 9, 1), (0, 1, 3), (0, 0, 1)])
def test_columns_that_are_not_there_are_refused(first, width, groups):
    with Graph("refused", input_types=[TensorType(DType.float32, ["T", 28], CPU)]) as graph:
        (x,) = graph.inputs
        with pytest.raises(ShapeError, match=r"x: expected columns .*, got 28"):
            ops.take_columns(x.tensor, first, width, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_to_the_bit(dtype):
    """-0, subnormal numbers and infinities too; NaN stays NaN."""
    x = sample(dtype, 3, 17) if dtype == "float32" else np.arange(2**16, dtype=np.uint16).view(dtype).reshape(64, -1)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = x.astype(np.float32)
    found, is_nan = execute(f"widen_{dtype}", x), np.isnan(expected)
    assert np.isnan(found[is_nan]).all()
    assert_bits_equal(found[~is_nan], expected[~is_nan], what="y")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["add", "silu", "gelu_tanh"])
@pytest.mark.parametrize("at", [3, 16])
def test_a_nan_of_sums_and_gated_units_stays(name, at, dtype):
    for which in range(2):
        x = [sample(dtype, 1, 17), sample(dtype, 1, 17, seed=1)]
        x[which][0, at] = np.nan
        assert np.flatnonzero(np.isnan(execute(f"{name}_{dtype}", *x))).tolist() == [at]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_units_far_from_zero_are_finite(activation):
    gate = np.array([[-1e4, -100, -0.0, 0, 100, 1e4]], np.float32)
    found = execute(f"{activation}_float32", gate, np.ones_like(gate))
    assert_near(found, np.maximum(gate, 0).astype(np.float64), "float32")
    if activation == "silu":  # small, but no gate is clipped
        gate = np.array([[-15], [-30], [-60]], np.float32)
        exact = gate / (1 + np.exp(-gate.astype(np.float64)))
        assert_near(execute("silu_float32", gate, np.ones_like(gate)), exact, "float32")


def test_lengths_and_last_rows():
    positions = np.array([4, 5, 6, 0, 9, 0], np.int32)  # the last one is padding
    lengths, last = execute("step_rows", positions, np.array([0, 3, 4, 5], np.uint32), np.zeros(3, np.uint32))
    assert lengths.tolist() == [5, 6, 7, 1, 10, 1]
    assert last.tolist() == [2, 3, 4]


def test_no_rows():
    x, heads, table = np.zeros((0, 24), np.float32), np.zeros((0, 2, 24), np.float32), np.zeros((0, 12), np.float32)
    assert execute("norm_plain_float32", x, np.ones(24, np.float32)).shape == (0, 24)
    assert execute("norm_heads_float32", heads, np.ones(24, np.float32)).shape == (0, 2, 24)
    assert execute("take_heads_float32", np.zeros((0, 2, 3), np.float32), np.zeros(0, np.int32)).shape == (0, 2, 3)
    assert execute("rotate_float32", heads, table, table).shape == (0, 2, 24)
    assert execute("hadamard_8_float32", np.zeros((0, 2, 8), np.float32)).shape == (0, 2, 8)
    assert [y.shape for y in execute("tables", np.zeros(0, np.int32))] == [(0, 20), (0, 20)]
    assert all(execute(f"{name}_float32", x, x).shape == (0, 24) for name in ("add", "silu", "gelu_tanh"))
    assert execute("widen_bfloat16", x.astype("bfloat16")).shape == (0, 24)
    nothing = np.zeros(1, np.uint32)
    assert [y.size for y in execute("step_rows", np.zeros(0, np.int32), nothing, nothing[:0])] == [0, 0]


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_functions_of_elements(name):
    """NaN and infinities too: where an operand is NaN, so is the result."""
    arrays = [sample("float32", 7, 37)] + ([sample("float32", 37, seed=1)] if name in BINARY else [])
    if name in ("log1p", "rsqrt"):
        arrays[0] = np.abs(arrays[0])
    for array in arrays:
        array.flat[[3, 20, 36]] = np.nan, np.inf, 0
    with np.errstate(all="ignore"):
        exact = (UNARY | BINARY)[name](*wide(*arrays))
    np.testing.assert_allclose(execute(name, *arrays), exact, rtol=1e-6, atol=1e-6)


X, ROWS, TABLE = TensorType(DType.float32, ["T", 8], CPU), TensorType(DType.int32, ["N"], CPU), ["T", 4]


@pytest.mark.parametrize(
    ("make", "types", "error", "words"),
    [
        (ops.take_rows, [X, TensorType(DType.int64, ["N"], CPU)], ContractTypeError, "rows"),
        (lambda x, w: ops.rms_norm(x, w, EPS), [X, TensorType(DType.float32, [7], CPU)], ShapeError, "weight"),
        (lambda x, w: ops.rms_norm(x, w, EPS), [ROWS, X], ContractTypeError, "x.*got int32"),
        (lambda x, c: ops.rotate(x, c, c), [X, TensorType(DType.float32, TABLE, CPU)], ShapeError, "x.*rank.*got 2"),
        (ops.hadamard, [X], ShapeError, "x.*rank.*got 2"),
        (ops.hadamard, [TensorType(DType.int32, ["T", 2, 8], CPU)], ContractTypeError, "x.*got int32"),
        (ops.hadamard, [TensorType(DType.float32, ["T", 2, "D"], CPU)], ShapeError, "x.*head_dim, got D"),
        (ops.hadamard, [TensorType(DType.float32, ["T", 2, 96], CPU)], ShapeError, "x.*power of two.*got 96"),
        (ops.hadamard, [TensorType(DType.float32, ["T", 2, 4], CPU)], ShapeError, "x.*power of two.*got 4"),
        (ops.hadamard, [TensorType(DType.float32, ["T", 2, 1024], CPU)], ShapeError, "x.*power of two.*got 1024"),
        (lambda x, y: ops.gate_units(x, y, "silu"), [X, TensorType(DType.float32, ["T", 9], CPU)], ShapeError, "up"),
        (lambda p: ops.rotary_tables(p, FREQUENCIES), [X], ContractTypeError, "positions"),
    ],
)
def test_what_does_not_fit_is_refused_while_the_graph_is_built(make, types, error, words):
    assert issubclass(error, (ContractError, ContractTypeError))
    with Graph("refused", input_types=types) as graph, pytest.raises(error, match=words):
        make(*(value.tensor for value in graph.inputs))
