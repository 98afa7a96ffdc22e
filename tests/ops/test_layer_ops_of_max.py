"""The ops over rows of activations as a GPU has them, which is of MAX's own ops: on the CPU, against this package's."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, TensorType

from paged_kv.graphs import ops
from support import op_graphs
from support.compare import assert_bits_equal

EPS, FACTOR, START, AMPLITUDE = 1e-5, 0.22, 40, 1.25
FREQUENCIES = (10000.0 ** -(np.arange(6) / 6)).astype(np.float32)
ROWS, HEADS, DIM = 5, 2, 16
POSITIONS = np.array([0, 3, START - 1, START, 5000], np.int32)


def activations(x, y, weight):
    return [
        ops.rms_norm(x, weight, EPS, offset=1.0),
        ops.rms_norm(x, weight, EPS),
        ops.rms_norm(x, weight, EPS, offset=1.0, rounds_once=True),
        ops.add_scaled(x, y, FACTOR),
        ops.add_scaled(x, y),
        ops.gate_units(x, y, "silu"),
        ops.gate_units(x, y, "gelu_tanh"),
        ops.widened(x),
    ]


def rows(x, chosen, positions, row_offsets):
    cos, sin = ops.rotary_tables(positions, FREQUENCIES, amplitude=AMPLITUDE, past=(START, FREQUENCIES / 4))
    lengths, last = ops.lengths_and_last_rows(positions, row_offsets, 2)
    return [ops.take_rows(x, chosen), ops.rotate(x, cos, sin), ops.hadamard(x), cos, sin, lengths, last]


def kind(dtype, *shape):
    return TensorType(DType[dtype], shape, DeviceRef.CPU())


GRAPHS = {
    "activations": (activations, [kind("bfloat16", ROWS, DIM), kind("bfloat16", ROWS, DIM), kind("bfloat16", DIM)]),
    "rows": (rows, [kind("bfloat16", ROWS, HEADS, DIM), kind("int32", 3), kind("int32", ROWS), kind("uint32", 3)]),
}


def of_max(*values, make):
    with mock.patch.object(DeviceRef, "is_gpu", return_value=True):
        return make(*values)


for name, (make, types) in GRAPHS.items():
    op_graphs.add(f"layer_{name}_of_ours", make, *types)
    op_graphs.add(f"layer_{name}_of_max", partial(of_max, make=make), *types, by_max=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["activations", "rows"])
def test_a_gpu_computes_the_same(name):
    rng = np.random.default_rng(0)
    samples = [rng.standard_normal([int(n) for n in t.shape]) for t in GRAPHS[name][1] if t.dtype == DType.bfloat16]
    arrays = [sample.astype("bfloat16") for sample in samples]
    if name == "rows":
        arrays += [np.array([4, 0, 4], np.int32), POSITIONS, np.array([0, 2, 5], np.uint32)]
    ours, theirs = (op_graphs.run(f"layer_{name}_of_{whose}", *arrays) for whose in ("ours", "max"))
    for mine, other in zip(ours, theirs, strict=True):
        if mine.dtype == np.int32:
            assert_bits_equal(other, mine, what="rows")
        else:  # where float32 sums in another order decide a tie, the next number
            assert other.dtype == mine.dtype
            assert other.shape == mine.shape
            assert (np.abs(other.astype(np.float64) - mine) <= np.spacing(np.abs(mine)).astype(np.float64) + 1e-6).all()
            assert mine.dtype == np.float32 or (other == mine).mean() > 0.95
