"""The op of a stack of weights of which each row takes one, against the linear op to the bit and a float64 product."""

from functools import cache

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import ops
from support import op_graphs
from support.compare import assert_bits_equal
from support.harness import refused

CPU = DeviceRef.CPU()
PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
"""The dtypes of x and of w."""
BY_MAX = PAIRS[:1]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def add(name, make, pair, x_shape, w_shape, *rest):
    types = TensorType(DType[pair[0]], x_shape, CPU), TensorType(DType[pair[1]], w_shape, CPU)
    op_graphs.add("_".join(["experts", name, *pair]), make, *types, *rest, by_max=pair in BY_MAX)


for pair in PAIRS:
    experts = TensorType(DType.int32, ["T", "C"], CPU)
    depth = "L" if pair in BY_MAX else "K"  # only the registered op compares sizes of two names
    add("tokens", ops.expert_linear, pair, ["T", "K"], ["E", "N", depth], experts)
    add("choices", ops.expert_linear, pair, ["T", "C", "K"], ["E", "N", depth], experts)
    add("one", ops.linear, pair, ["M", "K"], ["N", depth])


def execute(name, x, w, *rest):
    return op_graphs.run(f"experts_{name}_{x.dtype.name}_{w.dtype.name}", x, w, *rest)[0]


@cache
def weights(pair, count, n, k):
    return np.random.default_rng(n).standard_normal((count, n, k)).astype(pair[1]) / np.sqrt(k).astype(pair[1])


def operands(pair, tokens, choices, *, count=7, n=33, k=96, per_choice=False, seed=0):
    """x, w and experts; some experts have no rows, one has many, and some rows have no expert."""
    rng = np.random.default_rng(seed)
    shape = (tokens, choices, k) if per_choice else (tokens, k)
    experts = rng.choice([-1, 0, 2, 3, 3, 3, 5, 6], (tokens, choices)).astype(np.int32) % np.int32(count + 1)
    experts[experts == count] = -1
    return rng.standard_normal(shape).astype(pair[0]), weights(pair, count, n, k), experts


def expected(x, w, experts):
    """Each row by the weight that it names, alone: `[T, C, N]` of x's dtype, by the linear op."""
    y = np.zeros((*experts.shape, w.shape[1]), x.dtype)
    rows = x if x.ndim == 3 else np.repeat(x[:, None], experts.shape[1], axis=1)
    for expert in np.unique(experts[experts >= 0]):
        y[experts == expert] = execute("one", rows[experts == expert], w[expert].copy())
    return y


@pytest.mark.slow
@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 6), (3, 2), (17, 6), (70, 4), (300, 2)])
def test_a_row_has_the_bits_of_its_own_linear_layer(pair, tokens, choices, per_choice):
    x, w, experts = operands(pair, tokens, choices, per_choice=per_choice, seed=tokens)
    y = execute("choices" if per_choice else "tokens", x, w, experts)
    assert y.dtype == x.dtype
    assert_bits_equal(y, expected(x, w, experts), what="y")
    rows = x if per_choice else np.repeat(x[:, None], choices, axis=1)
    exact = np.einsum("tck,tcnk->tcn", rows.astype(np.float64), w[experts].astype(np.float64))
    exact[experts < 0] = 0
    scale = np.abs(exact).max(axis=-1, keepdims=True) + 1e-30
    assert (np.abs(y.astype(np.float64) - exact) / scale).max() < TOLERANCE[pair[0]]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_rows_that_are_sorted_need_no_copy_and_change_nothing(pair):
    x, w, _ = operands(pair, 3, 7, per_choice=True)
    experts = np.sort(np.array([[0, 0, 1, 1, 1, 2, 2], [2, 3, 4, 4, 5, 5, 5], [5, 6, 6, 6, 6, 6, 6]], np.int32))
    assert_bits_equal(execute("choices", x, w, experts), expected(x, w, experts), what="sorted")


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_other_experts_hold_is_not_used(pair):
    x, w, experts = operands(pair, 9, 3)
    w = w.copy()
    w[[1, 4]] = np.nan
    experts[experts == 1] = 0
    experts[experts == 4] = 0
    assert np.isfinite(execute("tokens", x, w, experts).astype(np.float64)).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_without_rows_there_is_no_result(shape):
    x, w, experts = operands(PAIRS[0], *shape)
    assert execute("tokens", x, w, experts).shape == (*shape, 33)


@pytest.mark.slow
def test_without_columns_a_sum_is_zero():
    x, w, experts = operands(PAIRS[0], 3, 2, k=0)
    assert_bits_equal(execute("tokens", x, w, experts), np.zeros((3, 2, 33), np.float32), what="a product of nothing")


@pytest.mark.slow
@pytest.mark.parametrize("expert", [7, -2, 2**31 - 1])
def test_an_expert_that_is_not_there_is_refused(expert):
    x, w, experts = operands(PAIRS[0], 5, 2)
    experts[2, 1] = expert
    with refused("experts", 5, expert):
        execute("tokens", x, w, experts)


@pytest.mark.slow
def test_weights_of_another_depth_are_refused():
    x, w, experts = operands(PAIRS[0], 5, 2)
    with refused("w", 95, 96):
        execute("tokens", x, np.ascontiguousarray(w[:, :, :95]), experts)


F32, I32 = DType.float32, DType.int32


@pytest.mark.parametrize(
    ("error", "message", "x", "w", "experts"),
    [
        (ShapeError, "w.*rank.*got 2", (F32, [4, 8]), (F32, [5, 8]), (I32, [4, 2])),
        (ShapeError, "x.*rank.*got 1", (F32, [8]), (F32, [3, 5, 8]), (I32, [4, 2])),
        (ShapeError, "w: expected dimension 2 to be 8, got 7", (F32, [4, 8]), (F32, [3, 5, 7]), (I32, [4, 2])),
        (ShapeError, "experts: expected dimension 0 to be 4, got 3", (F32, [4, 8]), (F32, [3, 5, 8]), (I32, [3, 2])),
        (ShapeError, "experts: expected dimension 1 to be 2, got 3", (F32, [4, 2, 8]), (F32, [3, 5, 8]), (I32, [4, 3])),
        (ContractTypeError, "experts.*got int64", (F32, [4, 8]), (F32, [3, 5, 8]), (DType.int64, [4, 2])),
        (ContractTypeError, "w.*got int32", (F32, [4, 8]), (I32, [3, 5, 8]), (I32, [4, 2])),
    ],
)
def test_what_does_not_fit_is_refused_while_the_graph_is_built(error, message, x, w, experts):
    types = [TensorType(dtype, shape, CPU) for dtype, shape in (x, w, experts)]
    with Graph("refused", input_types=types) as graph, pytest.raises(error, match=message):
        ops.expert_linear(*(value.tensor for value in graph.inputs))


def test_on_a_gpu_experts_are_refused():
    gpu = DeviceRef.GPU()
    types = [TensorType(F32, [4, 8], gpu), TensorType(F32, [3, 5, 8], gpu), TensorType(I32, [4, 2], gpu)]
    with Graph("refused", input_types=types) as graph, pytest.raises(ContractError, match="x: expected the CPU"):
        ops.expert_linear(*(value.tensor for value in graph.inputs))
