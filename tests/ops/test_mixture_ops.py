"""The ops of a mixture of experts beside its products, against NumPy float64: choices, gated units, weighted sums."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import ops
from support import op_graphs
from support.compare import assert_bits_equal

CPU = DeviceRef.CPU()
DTYPES = ("float32", "bfloat16", "float16")
CHOICES = {
    "softmax": (4, {}),
    "sums": (1, {"sum_to_one": True, "scale": 1.5}),
    "biased": (6, {"bias": True, "sum_to_one": True}),
    "groups": (3, {"groups": 4, "chosen_groups": 2, "scale": 16.0}),
    "sigmoids": (3, {"sigmoid": True, "bias": True, "groups": 4, "chosen_groups": 1, "sum_to_one": True}),
    "near": (3, {"jitter": 0.1, "scale": 2.0}),
}
"""Numbers of chosen experts and the options of `choose_experts`; the bias is an input."""
UNITS = {"silu": None, "clamped": (1.702, 0.7)}
INNER = 37


def kind(dtype, *shape):
    return TensorType(DType[dtype], shape, CPU)


def choose(logits, *bias, chosen, options):
    return ops.choose_experts(logits, chosen, **options | ({"bias": bias[0]} if bias else {}))


for name, (chosen, options) in CHOICES.items():
    biases = [kind("float32", "E")] * options.get("bias", False)
    op_graphs.add(
        f"mixture_{name}", partial(choose, chosen=chosen, options=options), kind("float32", "T", "E"), *biases
    )
for dtype in DTYPES:
    by_max = dtype == "float16"  # of no step on a CPU: the registered ops know no dtype by its name
    for name, clamped in UNITS.items():
        halves = partial(ops.gate_halves, clamped=clamped)
        op_graphs.add(f"mixture_{name}_{dtype}", halves, kind(dtype, "T", 2 * INNER), by_max=by_max)
    types = kind(dtype, "T", "C", "D"), kind("float32", "T", "C")
    op_graphs.add(f"mixture_sum_{dtype}", ops.weighted_sum, *types, by_max=by_max)


def execute(name, *arrays):
    results = op_graphs.run(f"mixture_{name}", *arrays)
    return results[0] if len(results) == 1 else results


def expected_choice(
    logits, chosen, bias=None, groups=1, chosen_groups=1, sigmoid=False, sum_to_one=False, scale=1.0, jitter=0
):
    """Indices and float64 weights of one row."""
    logits = logits.astype(np.float64)
    scores = (
        1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    )
    by = scores if bias is None else scores + bias
    grouped = np.sort(by.reshape(groups, -1), axis=1)
    of_groups = grouped[:, -2:].sum(1) if sigmoid and groups > 1 else grouped[:, -1]
    open_groups = np.argsort(-of_groups, kind="stable")[:chosen_groups]
    is_open = np.isin(np.arange(len(by)) // grouped.shape[1], open_groups)
    experts = np.argsort(np.where(is_open, -by, np.inf), kind="stable")[:chosen]
    weights = scores[experts]
    for index, expert in enumerate(experts if jitter else ()):
        own = logits[expert]
        near = (own - logits) / np.maximum(np.abs(logits), own) <= 2 * jitter
        near[experts[:index]] = False
        weights[index] = 1 / np.exp(logits[near] - own).sum()
    return experts, weights / (weights.sum() if sum_to_one else 1) * scale


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("rows", "count"), [(1, 16), (7, 32), (300, 128)])
def test_experts_are_chosen(name, rows, count):
    chosen, options = CHOICES[name]
    random = np.random.default_rng(count)
    logits = random.standard_normal((rows, count)).astype(np.float32)
    bias = [random.standard_normal(count).astype(np.float32)] if options.get("bias") else []
    weights, experts = execute(name, logits, *bias)
    assert (weights.dtype, experts.dtype) == (np.float32, np.int32)
    for row in range(rows):
        indices, exact = expected_choice(logits[row], chosen, **options | ({"bias": bias[0]} if bias else {}))
        assert experts[row].tolist() == indices.tolist()
        np.testing.assert_allclose(weights[row], exact, rtol=3e-6)


def test_of_equal_scores_the_lowest_index_comes_first():
    logits = np.zeros((2, 16), np.float32)
    logits[1, [3, 9]] = 1
    assert execute("softmax", logits)[1].tolist() == [[0, 1, 2, 3], [3, 9, 0, 1]]
    assert execute("groups", logits)[1].tolist() == [[0, 1, 2], [3, 9, 0]]


@pytest.mark.parametrize("name", ["softmax", "groups", "sigmoids"])
def test_an_index_is_always_an_expert(name):
    """Logits that are no numbers give weights that are none, and no index of another memory."""
    bias = [np.zeros(16, np.float32)] if CHOICES[name][1].get("bias") else []
    for value in (np.nan, np.inf, -np.inf):
        weights, experts = execute(name, np.full((3, 16), value, np.float32), *bias)
        assert all(len(set(row.tolist())) == len(row) and set(row.tolist()) <= set(range(16)) for row in experts)
        assert np.isnan(weights).all() or name == "sigmoids"
    logits = np.zeros((1, 16), np.float32)
    logits[0, 5] = np.nan
    assert 5 not in execute("sigmoids", logits, np.zeros(16, np.float32))[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("rows", [1, 3, 900])
def test_units_of_halves(name, dtype, rows):
    x = (2 * np.random.default_rng(rows).standard_normal((rows, 2 * INNER))).astype(dtype)
    found = execute(f"{name}_{dtype}", x)
    gate, up = x[:, :INNER].astype(np.float64), x[:, INNER:].astype(np.float64)
    if name == "silu":
        exact = gate / (1 + np.exp(-gate)) * up
    else:
        alpha, limit = (float(np.float32(number)) for number in UNITS[name])
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        exact = (up + 1) * gate / (1 + np.exp(-alpha * gate))
    assert found.dtype == np.dtype(dtype)
    assert found.shape == exact.shape
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype] * (2 if name == "silu" else 1)
    assert (np.abs(found.astype(np.float64) - exact) <= rounding * np.abs(exact) + 1e-6).all()


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("at", [0, 36, 37, 73])
def test_a_nan_stays_in_its_unit(name, at):
    x = np.ones((2, 2 * INNER), np.float32)
    x[1, at] = np.nan
    assert np.argwhere(np.isnan(execute(f"{name}_float32", x))).tolist() == [[1, at % INNER]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "columns"), [(1, 1, 1), (3, 4, 37), (500, 2, 64)])
def test_sums_by_weights(dtype, rows, count, columns):
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, count, columns)).astype(dtype)
    weights = random.standard_normal((rows, count)).astype(np.float32)
    found = execute(f"sum_{dtype}", x, weights)
    exact = np.einsum("ncd,nc->nd", x.astype(np.float64), weights.astype(np.float64))
    half = np.spacing(np.abs(found)).astype(np.float64) / 2
    assert found.dtype == np.dtype(dtype)
    assert (np.abs(found.astype(np.float64) - exact) <= half + 2e-6).all()


def test_no_rows():
    assert [y.shape for y in execute("softmax", np.zeros((0, 16), np.float32))] == [(0, 4), (0, 4)]
    assert execute("silu_float32", np.zeros((0, 2 * INNER), np.float32)).shape == (0, INNER)
    nothing = execute("sum_float32", np.zeros((0, 2, 5), np.float32), np.zeros((0, 2), np.float32))
    assert_bits_equal(nothing, np.zeros((0, 5), np.float32), what="y")


def test_more_experts_than_there_are_to_choose_from():
    with pytest.raises(ValueError, match="experts: 4 of 3 are chosen"):
        execute("softmax", np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="sizes: 4 groups do not divide 6 experts"):
        execute("groups", np.zeros((1, 6), np.float32))


LOGITS, HALVES = TensorType(DType.float32, ["T", 8], CPU), TensorType(DType.float32, ["T", 7], CPU)


@pytest.mark.parametrize(
    ("make", "types", "error", "words"),
    [
        (lambda x: ops.choose_experts(x, 2), [TensorType(DType.bfloat16, ["T", 8], CPU)], ContractTypeError, "logits"),
        (
            lambda x: ops.choose_experts(x, 2),
            [TensorType(DType.float32, ["T", 8], DeviceRef.GPU())],
            ContractError,
            "CPU",
        ),
        (
            lambda x, b: ops.choose_experts(x, 2, bias=b),
            [LOGITS, TensorType(DType.float32, [7], CPU)],
            ShapeError,
            "bias",
        ),
        (lambda x: ops.choose_experts(x, 2, jitter=0.1, sigmoid=True), [LOGITS], ContractError, "jitter: requires"),
        (lambda x: ops.choose_experts(x, 2, jitter=0.1, groups=2), [LOGITS], ContractError, "jitter: requires"),
        (ops.gate_halves, [HALVES], ShapeError, "x: expected two dimensions"),
        (ops.gate_halves, [TensorType(DType.int32, ["T", 8], CPU)], ContractTypeError, "x.*got int32"),
        (ops.weighted_sum, [LOGITS, LOGITS], ShapeError, "x.*rank.*got 2"),
        (ops.weighted_sum, [TensorType(DType.float32, ["T", 3, 8], CPU), LOGITS], ShapeError, "weights"),
    ],
)
def test_what_does_not_fit_is_refused_while_the_graph_is_built(make, types, error, words):
    with Graph("refused", input_types=types) as graph, pytest.raises(error, match=words):
        make(*(value.tensor for value in graph.inputs))
