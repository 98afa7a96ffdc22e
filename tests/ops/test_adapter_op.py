"""The op that adds to each row what its own adapter makes of it, against float64 products and to the bit."""

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
"""The dtypes of x and of the stacks."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
COUNT = 5

for pair in PAIRS:
    x, w = DType[pair[0]], DType[pair[1]]
    types = [TensorType(x, ["M", "N"], CPU), TensorType(x, ["M", "K"], CPU)]
    types += [TensorType(w, ["E", "R", "K"], CPU), TensorType(w, ["E", "R", "N"], CPU)]
    types.append(TensorType(DType.int32, ["M"], CPU))
    op_graphs.add("_".join(["adapters", *pair]), ops.adapter_linear, *types, by_max=pair == PAIRS[0])


def execute(y, x, a, b, adapters):
    return op_graphs.run(f"adapters_{x.dtype.name}_{a.dtype.name}", y, x, a, b, adapters)[0]


def operands(pair, m, n, k, rank, seed=0):
    """Adapter 1 is in no row, and is NaN."""
    rng = np.random.default_rng(seed)
    sizes = ((m, n), (m, k), (COUNT, rank, k), (COUNT, rank, n))
    kinds = (pair[0], pair[0], pair[1], pair[1])
    y, x, a, b = (rng.standard_normal(size).astype(kind) for size, kind in zip(sizes, kinds, strict=True))
    a[1] = b[1] = np.nan
    return y, x, a, b, rng.choice([-1, 0, 2, 3, 4], m).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "rank"),
    [
        (1, 256, 96, 16),
        (1, 7, 5, 1),
        (2, 130, 64, 8),
        (9, 33, 17, 3),
        (70, 300, 200, 21),
        (3, 16, 16, 256),
        (0, 8, 8, 4),
    ],
)
def test_each_row_has_what_its_own_adapter_adds(pair, m, n, k, rank):
    y, x, a, b, adapters = operands(pair, m, n, k, rank, seed=m)
    result = execute(y, x, a, b, adapters)
    assert result.dtype == y.dtype
    assert_bits_equal(result[adapters < 0], y[adapters < 0], what="rows without an adapter")
    wide = [each.astype(np.float64) for each in (y, x, a, b)]
    for row in np.flatnonzero(adapters >= 0):
        each = adapters[row]
        exact = wide[0][row] + wide[1][row] @ wide[2][each].T @ wide[3][each]
        assert np.abs(result[row].astype(np.float64) - exact).max() < TOLERANCE[pair[0]] * np.abs(exact).max()
        alone = execute(y[row : row + 1], x[row : row + 1], a, b, adapters[row : row + 1])
        assert_bits_equal(alone[0], result[row], what="a row alone")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [COUNT, -2, 2**31 - 1])
def test_an_adapter_that_is_not_there_is_refused(adapter):
    y, x, a, b, adapters = operands(PAIRS[0], 5, 8, 8, 4)
    adapters[2] = adapter
    with refused("adapters", 2, adapter, COUNT):
        execute(y, x, a, b, adapters)


F32, I32 = DType.float32, DType.int32
SHAPES = {"y": [4, 6], "x": [4, 8], "a": [3, 2, 8], "b": [3, 2, 6], "adapters": [4]}


@pytest.mark.parametrize(
    ("error", "message", "argument", "shape", "dtype"),
    [
        (ShapeError, "y.*rank", "y", [6], F32),
        (ContractTypeError, "y.*got int32", "y", [4, 6], I32),
        (ShapeError, "x: expected dimension 0 to be 4, got 5", "x", [5, 8], F32),
        (ShapeError, "a: expected dimension 2 to be 8, got 7", "a", [3, 2, 7], F32),
        (ShapeError, "b: expected dimension 0 to be 3, got 4", "b", [4, 2, 6], F32),
        (ShapeError, "b: expected dimension 1 to be 2, got 3", "b", [3, 3, 6], F32),
        (ShapeError, "b: expected dimension 2 to be 6, got 8", "b", [3, 2, 8], F32),
        (ContractTypeError, "b.*got bfloat16", "b", [3, 2, 6], DType.bfloat16),
        (ContractTypeError, "x.*got bfloat16", "x", [4, 8], DType.bfloat16),
        (ContractTypeError, "adapters.*got int64", "adapters", [4], DType.int64),
        (ShapeError, "adapters", "adapters", [5], I32),
        (ContractError, "x: expected the CPU", None, None, None),
    ],
)
def test_what_does_not_fit_is_refused_while_the_graph_is_built(error, message, argument, shape, dtype):
    device = DeviceRef.GPU() if argument is None else CPU
    types = []
    for name, usual in SHAPES.items():
        kind = I32 if name == "adapters" else F32
        types.append(TensorType(dtype, shape, device) if name == argument else TensorType(kind, usual, device))
    with Graph("refused", input_types=types) as graph, pytest.raises(error, match=message):
        ops.adapter_linear(*(value.tensor for value in graph.inputs))
