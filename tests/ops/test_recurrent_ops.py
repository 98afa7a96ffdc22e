"""The ops of recurrent layers against NumPy float64: convolutions, matrix states, gated norms; what is saved where."""

from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph import ops as of_max

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import ops
from paged_kv.graphs.inputs import graph_states, state_input_types, state_inputs
from support import op_graphs

CPU = DeviceRef.CPU()
LAYERS, LAYER, SLOTS = 3, 1, 40
CHANNELS, VALUES = 277, 24
"""More than a task's channels, and more than a block's columns, in neither case a multiple of a vector."""
DELTAS = {"one": (4, 1, 16, False), "two": (4, 2, 9, False), "each": (4, 4, 64, False), "tiled": (4, 2, 9, True)}
"""Heads, key heads and dimensions of keys, and which key head a head has."""
SCANS = {"mamba": ((0.0, np.inf), "one"), "clamped": ((0.4, 0.9), "two")}
"""The range of time steps, and sizes."""


def add(name, shapes, types, make, *, by_max):
    given = [TensorType(DType[dtype], shape, CPU) for dtype, *shape in types]
    inputs = [*given, TensorType(DType.uint32, ["B_plus_1"], CPU), *state_input_types(shapes, CPU).flatten()]

    def with_states(*values):
        own, (offsets, *table) = values[: len(given)], values[len(given) :]
        return make(ops.States.of(graph_states(table), offsets).of_layer(LAYER), *own)

    op_graphs.add(name, with_states, *inputs, by_max=by_max)


def window_shape(kernel):
    return ["slots", LAYERS, kernel, CHANNELS]


def matrix_shape(heads, dim):
    return ["slots", LAYERS, heads, -(-VALUES // 16), dim, 16]


for name, dtype, activation, biased in (("silu", "float32", "silu", True), ("none", "bfloat16", "none", False)):
    types = [(dtype, "T", CHANNELS), (dtype, CHANNELS, "K"), *[(dtype, CHANNELS)] * biased]
    make = partial(ops.causal_conv1d, activation=activation)
    add(f"conv_{name}", [window_shape("past")], types, make, by_max=name == "none")
for name, (heads, key_heads, dim, tiled) in DELTAS.items():
    row = ("float32", "T", heads)
    types = [("float32", "T", 2 * key_heads * dim + heads * VALUES), row, row, *[("float32", heads)] * 2]
    make = partial(ops.gated_delta_rule, key_heads=key_heads, key_dim=dim, tiled=tiled)
    add(f"delta_{name}", [window_shape(1), matrix_shape(heads, dim)], types, make, by_max=name == "two")
for name, (dt_range, sizes) in SCANS.items():
    heads, groups, dim, tiled = DELTAS[sizes]
    types = [("float32", "T", 2 * groups * dim + heads * VALUES), ("float32", "T", heads), *[("float32", heads)] * 3]
    make = partial(ops.selective_scan, groups=groups, state_size=dim, dt_range=dt_range, tiled=tiled)
    add(f"scan_{name}", [window_shape(1), matrix_shape(heads, dim)], types, make, by_max=False)
for dtype in ("float32", "bfloat16"):
    for groups, first in ((1, False), (3, True)):
        types = [TensorType(DType[kind], shape, CPU) for kind, shape in
                 (("float32", ["T", 111]), (dtype, ["T", 111]), (dtype, [37 * groups]))]  # fmt: skip
        make = partial(ops.gated_norm, eps=1e-5, groups=groups, gate_first=first)
        op_graphs.add(f"gated_norm_{groups}_{dtype}", make, *types, by_max=dtype == "bfloat16" and first)


@dataclass
class Plan:
    """Requests of a step: rows, slots that are read, and saves."""

    rows: list[int]
    sources: list[int]
    saves: list[list[tuple[int, int]]]

    @staticmethod
    def drawn(rng, rows):
        """Slots in any order; some requests begin, some are saved in place, some often."""
        free = rng.permutation(SLOTS).tolist()
        sources = [-1 if rng.random() < 0.3 else free.pop() for _ in rows]
        saves = []
        for count, source in zip(rows, sources, strict=True):
            ends = sorted({*rng.integers(1, count + 1, rng.integers(0, 4)).tolist(), count})
            slots = [free.pop() for _ in ends]
            if source >= 0 and rng.random() < 0.5:
                slots[rng.integers(len(slots))] = source
            saves.append(list(zip(ends, slots, strict=True)))
        return Plan(list(rows), sources, saves)

    @property
    def offsets(self):
        return np.concatenate([[0], np.cumsum(self.rows)]).astype(np.uint32)

    def parts(self):
        return zip(self.offsets[:-1].tolist(), self.rows, self.sources, self.saves, strict=True)


def execute(name, plan, arrays, buffers):
    """The output; `buffers` are changed."""
    table = state_inputs(plan.sources, plan.saves, buffers)
    (found,) = op_graphs.run(name, *arrays, plan.offsets, *table.flatten())
    return found.astype(np.float64)


def poisoned(shape):
    return np.full([SLOTS if size == "slots" else size for size in shape], np.nan, np.float32)


def assert_states(found, before, expected, plan):
    """The saved slots of the layer are as expected, all else is as before, bit for bit."""
    rest = np.ones(found.shape, bool)
    for slot, state in expected.items():
        np.testing.assert_allclose(found[slot, LAYER], state, rtol=2e-5, atol=2e-5, err_msg=str((slot, plan)))
        rest[slot, LAYER] = False
    np.testing.assert_array_equal(found.view(np.uint32)[rest], before.view(np.uint32)[rest])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolutions_see_the_last_inputs_of_their_request(activation, kernel):
    rng = np.random.default_rng(kernel)
    plan = Plan.drawn(rng, [1, 7, 2, 40, 1, 3])
    shapes = ((58, CHANNELS), (CHANNELS, kernel), CHANNELS)  # 4 rows of padding
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    arrays = [x, weight, bias]
    if activation == "none":
        arrays = [bfloat16(x), bfloat16(weight)]
        x, weight, bias = arrays[0].astype(np.float32), arrays[1].astype(np.float32), np.zeros(CHANNELS)
    windows = poisoned(window_shape(kernel - 1))
    for source in plan.sources:
        windows[source, LAYER] = rng.standard_normal(windows.shape[2:]) if source >= 0 else windows[source, LAYER]
    before, expected, states = windows.copy(), np.zeros(x.shape), {}
    for begin, count, source, saves in plan.parts():
        past = before[source, LAYER] if source >= 0 else np.zeros(windows.shape[2:])
        seen = np.concatenate([past, x[begin : begin + count]]).astype(np.float64)
        for row in range(count):
            sums = (weight.T * seen[row : row + kernel]).sum(0) + bias
            expected[begin + row] = sums / (1 + np.exp(-sums)) if activation == "silu" else sums
        states |= {slot: seen[after : after + kernel - 1] for after, slot in saves}
    found = execute(f"conv_{activation}", plan, arrays, [windows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert_states(windows, before, states, plan)


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16)


def softplus(x):
    return np.logaddexp(0, x)


def rows_of(name, rng, count):
    """Inputs of a recurrence with both signs and gates near 0 and 1, and what they are in float64, for each head: q, k,
    v, decay, rate, skip.
    """
    kind, _, case = name.partition("_")
    heads, key_heads, dim, tiled = DELTAS[case if kind == "delta" else SCANS[case][1]]
    keys, values = key_heads * dim, heads * VALUES
    x = rng.standard_normal((count, 2 * keys + values)).astype(np.float32)
    a, b = (rng.uniform(-6, 4, (count, heads)).astype(np.float32) for _ in range(2))
    rates, bias, skip = (rng.uniform(-2, 1, heads).astype(np.float32) for _ in range(3))
    wide = x.astype(np.float64)
    key_head = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
    if kind == "delta":
        q, k = (wide[:, at : at + keys].reshape(count, key_heads, dim) for at in (0, keys))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, v = q / np.sqrt(dim), wide[:, 2 * keys :]
        step, rate, skip_of = softplus(a + bias.astype(np.float64)), 1 / (1 + np.exp(-b.astype(np.float64))), 0 * skip
        arrays = [x, a, b, rates, bias]
    else:
        v, k, q = wide[:, :values], wide[:, values : values + keys], wide[:, values + keys :]
        q, k = (part.reshape(count, key_heads, dim) for part in (q, k))
        step = rate = np.clip(softplus(a + bias.astype(np.float64)), *SCANS[case][0])
        skip_of = skip.astype(np.float64)
        arrays = [x, a, rates, skip, bias]
    decay = np.exp(-np.exp(rates.astype(np.float64)) * step)
    v = v.reshape(count, heads, VALUES)
    return arrays, (q[:, key_head], k[:, key_head], v, decay, rate, skip_of), (heads, dim)


def by_rows(state, q, k, v, decay, rate, skip, delta):
    """Outputs `[T, H, Dv]` and states `[T + 1, H, Dk, Dv]`, one row after the other."""
    outputs, states = [], [state]
    for t in range(len(q)):
        state = state * decay[t][:, None, None]
        learnt = v[t] - np.einsum("hkv,hk->hv", state, k[t]) if delta else v[t]
        state = state + np.einsum("hk,hv->hkv", k[t], rate[t][:, None] * learnt)
        outputs.append(np.einsum("hkv,hk->hv", state, q[t]) + skip[:, None] * v[t])
        states.append(state)
    return np.array(outputs), states


def unblocked(matrices):
    """`[..., H, Dk, Dv]` of blocks `[..., H, blocks, Dk, 16]`."""
    whole = np.moveaxis(matrices, -3, -2)
    return whole.reshape(*whole.shape[:-2], -1)


NAMES = [*(f"delta_{name}" for name in DELTAS), *(f"scan_{name}" for name in SCANS)]


@pytest.mark.parametrize("name", NAMES)
def test_recurrences_are_those_of_float64(name):
    rng = np.random.default_rng(1)
    plan = Plan.drawn(rng, [1, 33, 2, 1, 70, 5])
    total = sum(plan.rows)
    arrays, wide, (heads, dim) = rows_of(name, rng, total + 3)
    matrices = poisoned(matrix_shape(heads, dim))
    for source in plan.sources:
        if source >= 0:
            matrices[source, LAYER] = rng.standard_normal(matrices.shape[2:])
            matrices[source, LAYER, :, -1, :, VALUES % 16 :] = 0  # past the end of a value, as it is saved
    before, expected, states = matrices.copy(), np.zeros((total + 3, heads, VALUES)), {}
    for begin, count, source, saves in plan.parts():
        state = np.zeros((heads, dim, VALUES))
        if source >= 0:
            state = unblocked(before[source, LAYER])[..., :VALUES].astype(np.float64)
        part = [values[begin : begin + count] for values in wide[:5]]
        delta = name.startswith("delta")
        expected[begin : begin + count], path = by_rows(state, *part, wide[5], delta)
        for after, slot in saves:
            states[slot] = path[after]
    found = execute(name, plan, arrays, [poisoned(window_shape(1)), matrices])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=3e-5, atol=3e-5)
    found_states = unblocked(matrices)
    assert not found_states[sorted(states), LAYER][..., VALUES:].any(), "columns past the end of a value are 0"
    assert_states(found_states[..., :VALUES].copy(), unblocked(before)[..., :VALUES].copy(), states, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_two", "scan_mamba"])
def test_a_text_in_pieces_is_the_text_at_once(name):
    """To the last bit, wherever its states are saved: what is in a step changes no token."""
    rng = np.random.default_rng(2)
    arrays, _, (heads, dim) = rows_of(name, rng, 50)
    whole, pieces = (poisoned(matrix_shape(heads, dim)) for _ in range(2))
    window = poisoned(window_shape(1))
    saves = [(3, 7), (4, 8), (41, 9), (50, 3)]
    expected = execute(name, Plan([50], [-1], [saves]), arrays, [window, whole])
    found, source = [], -1
    for begin, end in ((0, 1), (1, 2), (2, 30), (30, 50)):
        part = [each[begin:end] if each.ndim == 2 else each for each in arrays]
        found.append(execute(name, Plan([end - begin], [source], [[(end - begin, 5)]]), part, [window, pieces]))
        source = 5
    np.testing.assert_array_equal(np.concatenate(found), expected)
    np.testing.assert_array_equal(pieces[5, LAYER], whole[3, LAYER])


def test_gates_at_their_ends_forget_all_and_learn_nothing():
    arrays, _, (heads, dim) = rows_of("delta_one", np.random.default_rng(3), 4)
    arrays[1][:], arrays[2][:] = 3000, -200  # decay 0, rate 0
    matrices = poisoned(matrix_shape(heads, dim))
    matrices[0] = 1e30
    found = execute("delta_one", Plan([4], [0], [[(4, 1)]]), arrays, [poisoned(window_shape(1)), matrices])
    assert (found == 0).all()
    assert (matrices[1, LAYER] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norms(dtype, groups):
    rng = np.random.default_rng(4)
    x, z, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 111), (9, 111), 37 * groups))
    given = [x, *(bfloat16(each) if dtype == "bfloat16" else each for each in (z, weight))]
    z, weight = (each.astype(np.float64) for each in given[1:])
    gate = z / (1 + np.exp(-z))
    wide = (x * gate if groups == 3 else x.astype(np.float64)).reshape(9, 3, 37)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.reshape(-1, 37)
    expected = wide.reshape(9, 111) * (1 if groups == 3 else gate)
    (found,) = op_graphs.run(f"gated_norm_{groups}_{dtype}", *given)
    limit = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan([2, 2], [SLOTS, -1], [[(2, 0)], [(2, 1)]]), "sources: request 0 has slot 40, there are 40"),
        (Plan([2, 2], [-1, -2], [[(2, 0)], [(2, 1)]]), "sources: request 1 has slot -2"),
        (Plan([2, 2], [-1, -1], [[(2, 0)], [(2, -1)]]), "save_slots: save 1 is slot -1"),
        (Plan([2, 2], [-1, -1], [[(2, 0)], [(1, 1)]]), "save_counts: request 1 is not saved after its last row"),
        (Plan([2, 2], [-1, -1], [[(2, 0), (2, 1)], [(2, 2)]]), "save_counts: save 1 of request 0 is after 2"),
        (Plan([2, 2], [-1, -1], [[(2, 0)], []]), "save_offsets: request 1 has saves that are none of 1"),
        (Plan([2, 3], [-1, -1], [[(2, 0)], [(3, 1)]]), "row_offsets: request 1 has rows that are none of 4"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(plan, message):
    for name, shapes in (("conv_silu", [window_shape(3)]), ("delta_one", [window_shape(1), matrix_shape(4, 16)])):
        rng = np.random.default_rng(5)
        arrays = rows_of("delta_one", rng, 4)[0]
        if name == "conv_silu":
            arrays = [np.zeros(shape, np.float32) for shape in ((4, CHANNELS), (CHANNELS, 4), CHANNELS)]
        buffers = [poisoned(shape) for shape in shapes]
        with pytest.raises(ValueError, match=message):
            execute(name, plan, arrays, buffers)
        assert all(np.isnan(buffer).all() for buffer in buffers)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda at, x, w, _: ops.causal_conv1d(at, x[:, :8], w), ShapeError, "weight"),
        (lambda at, x, w, _: ops.causal_conv1d(at, x, of_max.cast(w, DType.int32)), ContractTypeError, "weight.*dtype"),
        (lambda at, x, w, m: ops.gated_delta_rule(at, x, m, m[:, :2], w[:4, 0], w[:4, 0], key_heads=1, key_dim=16),
         ShapeError, "b"),
        (lambda at, x, w, m: ops.gated_delta_rule(at, x, m, m, w[:4, 0], w[:4, 0], key_heads=3, key_dim=16),
         ShapeError, "x: expected .* to divide"),
        (lambda at, x, w, m: ops.gated_delta_rule(at, x, *[m[:, :1]] * 2, *[w[:1, 0]] * 2, key_heads=1, key_dim=2),
         ContractError, "buffers: expected matrix states"),
        (lambda _, x, w, __: ops.gated_norm(x, x, w[:10, 0], 1e-5), ShapeError, "weight.*got 10 elements"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(call, error, message):
    windows = state_input_types([window_shape(3)], CPU)
    types = [TensorType(DType.float32, shape, CPU) for shape in (["T", CHANNELS], [CHANNELS, 4], ["T", 4])]
    types += [TensorType(DType.uint32, ["B_plus_1"], CPU), *windows.flatten()]
    with Graph("refused", input_types=types) as graph:
        x, w, m, offsets, *table = graph.inputs
        at = ops.States.of(graph_states(table), offsets.tensor)
        with pytest.raises(error, match=message):
            call(at, x.tensor, w.tensor, m.tensor)


def test_buffers_of_states_are_float32_of_their_rank():
    for buffer, error in (
        (BufferType(DType.bfloat16, ["S", 1, 1, 1], CPU), ContractTypeError),
        (BufferType(DType.float32, ["S", 1, 1], CPU), ShapeError),
    ):
        types = [TensorType(DType.uint32, ["B_plus_1"], CPU), *state_input_types([[1]], CPU).flatten()[:-1], buffer]
        with Graph("refused", input_types=types) as graph:
            offsets, *table = graph.inputs
            with pytest.raises(error):
                ops.States.of(graph_states(table), offsets.tensor)
