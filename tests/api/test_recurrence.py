"""FlashInfer's calls of recurrent layers against NumPy float64, row by row; every error of their contract."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PageTableError, ShapeError
from paged_kv.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose
from paged_kv.gdn_prefill import chunk_gated_delta_rule
from paged_kv.mamba import selective_state_update

K, V = 24, 40
"""More columns than a block has, and no multiple of one."""


def walk(q, k, v, decays, rates, state, delta=True):
    """Outputs `[T, H, V]` of rows, and the states `[T, H, K, V]` after each; q has its scale."""
    o, states, state = [], [], state.astype(np.float64)
    for qs, ks, vs, d, r in zip(q, k, v, decays, rates, strict=True):
        group = len(vs) // len(ks)
        qs, ks = (np.repeat(x, group, axis=0).astype(np.float64) for x in (qs, ks))
        state = state * d[:, None, None]
        u = r[:, None] * (vs - (np.einsum("hkv,hk->hv", state, ks) if delta else 0))
        state = state + ks[:, :, None] * u[:, None, :]
        o.append(np.einsum("hkv,hk->hv", state, qs))
        states.append(state)
    return np.array(o).reshape(len(q), *v.shape[1:]), states


def normed(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)


def assert_near(got, expected, bound=1e-5):
    got = got.float().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    assert np.abs(got.astype(np.float64) - expected).max(initial=0) <= bound * np.abs(expected).max(initial=1)


def drawn(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("heads", [(2, 2, 6), (4, 2, 2), (3, 3, 3)])
@pytest.mark.parametrize("plain", [True, False])
def test_prompts(heads, plain):
    rng, lengths = np.random.default_rng(sum(heads)), [0, 1, 7, 90]
    rows, most = sum(lengths), max(heads)
    q, k, v = (drawn(rng, rows, count, dim) for count, dim in zip(heads, (K, K, V), strict=True))
    g, beta = rng.random((rows, most), np.float32), rng.random((rows, most), np.float32)
    before = drawn(rng, len(lengths), most, V, K)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    kept = np.full((34, most, V, K), np.nan, np.float32)
    more = {} if plain else {"g": g, "beta": beta, "initial_state": before, "use_qk_l2norm_in_kernel": True}
    if not plain:
        starts = np.array([0, 0, 0, 2, 32])
        more |= {"state_checkpoints": kept, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 3}
    o, after = chunk_gated_delta_rule(q, k * 0.2, v, cu_seqlens=offsets, output_final_state=True, **more)
    expanded = most // heads[1] if heads[0] > heads[2] else 1
    keys, values = (np.repeat(x, expanded, axis=1) for x in (k * 0.2, v))
    queries, keys = (normed(q), normed(keys)) if not plain else (q, keys)
    checkpoints = []
    for b, (begin, end) in enumerate(pairwise(offsets)):
        own = slice(begin, end)
        state = np.zeros((most, K, V)) if plain else before[b].swapaxes(1, 2)
        gates = (np.ones((end - begin, most)),) * 2 if plain else (g[own], beta[own])
        expected, states = walk(queries[own] * K**-0.5, keys[own], values[own], *gates, state)
        assert_near(o[own], expected)
        assert_near(after[b], (states[-1] if states else state).swapaxes(1, 2))
        checkpoints += [each.swapaxes(1, 2) for each in states[2::3]]
    if not plain:
        assert_near(kept[:32], np.array(checkpoints))
        assert np.isnan(kept[32:]).all()


def test_results_go_where_they_are_wanted():
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(drawn(rng, 9, 2, dim)).bfloat16() for dim in (K, K, V))
    whole = chunk_gated_delta_rule(q, k, v, use_qk_l2norm_in_kernel=True)
    assert whole.dtype == torch.bfloat16
    into, state = torch.zeros(9, 2, V, dtype=torch.bfloat16), torch.zeros(1, 2, V, K)
    found = chunk_gated_delta_rule(
        q, k, v, use_qk_l2norm_in_kernel=True, output=into, output_state=state, output_final_state=True
    )
    assert found[0] is into
    assert found[1] is state
    assert torch.equal(into, whole)
    assert state.abs().sum() > 0


class Step:
    """New tokens of some requests, and the gates of an oracle."""

    def __init__(self, tokens, requests=3, dtype=np.float32):
        rng = np.random.default_rng(tokens)
        self.q, self.k = (drawn(rng, requests, tokens, 2, K, dtype=dtype) for _ in range(2))
        self.v = drawn(rng, requests, tokens, 6, V, dtype=dtype)
        self.a, self.b = (drawn(rng, requests, tokens, 6, dtype=dtype) for _ in range(2))
        self.a_log, self.bias = drawn(rng, 6) - 1, drawn(rng, 6)
        self.pool = drawn(rng, 5, 6, V, K)

    def expected(self, request, state):
        a, b = self.a[request].astype(np.float64), self.b[request].astype(np.float64)
        decays, rates = np.exp(-np.exp(self.a_log) * np.log1p(np.exp(a + self.bias))), 1 / (1 + np.exp(-b))
        q, k = normed(self.q[request]) * K**-0.5, normed(self.k[request])
        return walk(q, k, self.v[request].astype(np.float64), decays, rates, state.astype(np.float64).swapaxes(1, 2))

    def inputs(self, state):
        return self.q, self.k, self.v, state, self.a_log, self.a, self.bias, self.b


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_new_tokens(tokens, dtype):
    step = Step(tokens, dtype=dtype)
    for call, turn in ((gated_delta_rule_decode_pretranspose, 1), (gated_delta_rule_decode, -1)):
        before = step.pool[:3].astype(dtype)
        state = np.array(before if turn == 1 else before.swapaxes(2, 3), order="C")
        o, found = call(*step.inputs(state))
        assert found is state
        assert o.dtype == dtype
        for request in range(3):
            expected, states = step.expected(request, before[request])
            bound = 1e-5 if dtype == np.float32 else 0.01
            assert_near(o[request], expected, bound)
            assert_near(state[request], states[-1].swapaxes(1, 2) if turn == 1 else states[-1], bound)


def test_a_pool_of_states():
    """A request is padding; one goes on elsewhere; all else is as it was, bit for bit."""
    step = Step(2)
    pool, between = step.pool.copy(), np.full((3, 2, 6, V, K), np.nan, np.float32)
    slots = {"initial_state_indices": np.array([4, -1, 0]), "output_state_indices": np.array([4, -1, 1])}
    o, found = gated_delta_rule_decode_pretranspose(
        *step.inputs(None), initial_state=pool, **slots, intermediate_states_buffer=between
    )
    assert found is pool
    for request, source, target in ((0, 4, 4), (2, 0, 1)):
        expected, states = step.expected(request, step.pool[source])
        assert_near(o[request], expected)
        assert_near(pool[target], states[-1].swapaxes(1, 2))
        assert_near(between[request], np.array(states).swapaxes(2, 3))
    assert not o[1].any()
    assert np.isnan(between[1]).all()
    assert np.array_equal(pool[[0, 2, 3]], step.pool[[0, 2, 3]])
    again, untouched = step.pool.copy(), slots | {"initial_state": step.pool, "disable_state_update": True}
    assert np.array_equal(gated_delta_rule_decode_pretranspose(*step.inputs(None), **untouched)[0], o)
    assert np.array_equal(step.pool, again)


@pytest.mark.parametrize("tokens", [None, 3])
def test_mamba(tokens):
    rng, (requests, heads, groups) = np.random.default_rng(5), (3, 6, 2)
    outer = (requests,) if tokens is None else (requests, tokens)
    x, z = drawn(rng, *outer, heads, V), drawn(rng, *outer, heads, V)
    of_b, of_c = drawn(rng, *outer, groups, K), drawn(rng, *outer, groups, K)
    dt, bias, rate = drawn(rng, *outer, heads), drawn(rng, heads), -rng.random(heads, np.float32)
    d, pool = drawn(rng, heads, V), drawn(rng, 5, heads, V, K)
    before, slots = pool.copy(), np.array([3, 9, 1])
    tied = np.broadcast_to(rate[:, None, None], (heads, V, K)), np.broadcast_to(bias[:, None], (heads, V))
    steps = np.broadcast_to(dt[..., None], x.shape)
    y = selective_state_update(
        pool, x, steps, tied[0], of_b, of_c, d, z, tied[1], True, state_batch_indices=slots, pad_slot_id=9
    )
    assert y.shape == x.shape
    for request, slot in ((0, 3), (2, 1)):
        each = [part[request].reshape(tokens or 1, *part.shape[len(outer) :]) for part in (of_c, of_b, x, dt, z, y)]
        t = np.log1p(np.exp(each[3].astype(np.float64) + bias))
        expected, states = walk(*each[:3], np.exp(rate * t), t, before[slot].swapaxes(1, 2), delta=False)
        assert_near(each[5], (expected + d * each[2]) * each[4] / (1 + np.exp(-each[4].astype(np.float64))))
        assert_near(pool[slot], states[-1].swapaxes(1, 2))
    assert not y[1].any()
    assert np.array_equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def decode(**changes):
    step, names = Step(1), ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b")
    given = dict(zip(names, step.inputs(step.pool[:3].copy()), strict=True))
    return gated_delta_rule_decode_pretranspose(**{**given, **changes})


def prefill(**changes):
    rng = np.random.default_rng(1)
    given = {name: drawn(rng, 5, 2, dim) for name, dim in (("q", K), ("k", K), ("v", V))}
    return chunk_gated_delta_rule(**{**given, **changes})


def update(**changes):
    ones = np.ones((2, 4, V), np.float32)
    given = {"state": np.zeros((3, 4, V, K), np.float32), "x": ones, "dt": ones, "A": np.ones((4, V, K), np.float32)}
    given |= {name: np.ones((2, 1, K), np.float32) for name in "BC"} | {"D": np.ones((4, V), np.float32)}
    return selective_state_update(**{**given, **changes})


FROZEN = np.zeros((3, 6, V, K), np.float32)
FROZEN.flags.writeable = False
POOL = {"state": None, "initial_state": np.zeros((5, 6, V, K), np.float32)}


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        (prefill, {"k": np.ones((5, 3, K), np.float32)}, ShapeError, "k: expected heads that fit 2 of q"),
        (prefill, {"v": np.ones((4, 2, V), np.float32)}, ShapeError, r"v: expected shape \[5,.* got \[4, 2, 40\]"),
        (prefill, {"g": np.ones((5, 2), np.float16)}, ContractTypeError, "g: dtype float16 is none of float32"),
        (prefill, {"cu_seqlens": [0, 3, 2, 5]}, ContractTypeError, "cu_seqlens"),
        (prefill, {"cu_seqlens": np.array([0, 3, 2, 5])}, PageTableError, "cu_seqlens decreases at request 1"),
        (prefill, {"cu_seqlens": np.array([0, 3])}, ShapeError, "cu_seqlens: expected an end at q's 5 rows, got 3"),
        (prefill, {"checkpoint_every_n_tokens": 2}, ContractError, "state_checkpoints: expected an array where"),
        (prefill, {"checkpoint_cu_starts": np.array([0, 1])}, ContractError, "checkpoint_cu_starts: expected None"),
        (decode, {"state": None}, ContractError, "state: expected either state, or initial_state with"),
        (decode, {"state": FROZEN}, ContractError, "state is read-only"),
        (decode, {"state": np.zeros((3, 6, K, V), np.float32)}, ShapeError, r"expected shape \[3, 6, 40, 24\]"),
        (decode, {"output_state_indices": np.arange(3)}, ContractError, "output_state_indices: expected None without"),
        (decode, POOL | {"initial_state_indices": np.array([0, 5, 1])}, ContractError, "request 1: expected a slot"),
        (decode, POOL | {"initial_state_indices": np.array([0, 2, 0])}, ContractError, "slot 0 is written by 2"),
        (decode, {"a": np.ones((3, 1, 5), np.float32)}, ShapeError, r"a: expected shape \[3, 1, 6\], got \[3, 1, 5\]"),
        (update, {"rand_seed": np.zeros(1)}, ContractError, "rand_seed: expected None, got an object"),
        (update, {"dt": drawn(np.random.default_rng(2), 2, 4, V)}, ContractError, "dt: expected one number for"),
        (update, {"B": np.ones((2, 3, K), np.float32)}, ShapeError, "B: expected as many groups as C's 1"),
        (update, {"state": np.zeros((1, 4, V, K), np.float32)}, ShapeError, "state: expected a slot for each of 2"),
        (update, {"state_batch_indices": np.array([1, 1])}, ContractError, "slot 1 is written by 2 requests"),
    ],
)  # fmt: skip
def test_what_is_refused(call, changes, error, message):
    call()
    with pytest.raises(PagedKVError, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, error)


def sized(requests, tokens, key_heads, heads, key_dim, width, every=2):
    """Valid calls of these sizes, all that they may write given: functions, arguments and the shape of the output."""

    def ones(*shape):
        return np.ones(shape, np.float32)

    rows, slots = (requests, tokens), np.arange(requests)
    q, v, gates, state = (*rows, key_heads, key_dim), (*rows, heads, width), (*rows, heads), (heads, width, key_dim)
    step = {"q": ones(*q), "k": ones(*q), "v": ones(*v), "a": ones(*gates), "b": ones(*gates)}
    step |= {"A_log": ones(heads), "dt_bias": ones(heads), "output": ones(*v)}
    pool = {"initial_state": ones(requests, *state), "initial_state_indices": slots, "state": None}
    between = {"intermediate_states_buffer": ones(*rows, *state)}
    turned = {"state": ones(requests, heads, key_dim, width)}
    flat = {name: step[name].reshape(requests * tokens, *step[name].shape[2:]) for name in "qkv"}
    kept = tokens // every * requests
    flat |= {
        "state_checkpoints": ones(kept, *state),
        "checkpoint_cu_starts": np.arange(requests + 1) * (tokens // every),
    }
    flat |= {"checkpoint_every_n_tokens": every, "cu_seqlens": np.arange(requests + 1) * tokens}
    flat |= {"output_state": ones(requests, *state), "output_final_state": True, "output": ones(*flat["v"].shape)}
    scan = {"x": ones(*v), "dt": ones(*v), "B": ones(*q), "C": ones(*q), "D": ones(heads, width), "z": ones(*v)}
    scan |= {"A": ones(*state), "state": ones(requests, *state), "dt_bias": ones(heads, width), "out": ones(*v)}
    yield gated_delta_rule_decode_pretranspose, step | pool | between, v
    yield gated_delta_rule_decode, step | turned, v
    yield chunk_gated_delta_rule, flat, flat["v"].shape
    yield selective_state_update, scan, v


@pytest.mark.parametrize("empty", range(6))
def test_any_size_may_be_0(empty):
    """All but heads: they must be a multiple of those of keys, of which there is one at least."""
    sizes = [0 if i == empty else size for i, size in enumerate((2, 4, 1, 2, 8, 6))]
    for function, given, shape in sized(*sizes):
        if 0 in sizes[2:4] and (sizes[2] == 0 or function is chunk_gated_delta_rule):
            with pytest.raises(ShapeError, match=r"heads|groups"):
                function(**given)
            continue
        found = function(**given)
        assert (found[0] if isinstance(found, tuple) else found).shape == shape


WRITTEN = ("state", "initial_state", "output", "out", "output_state", "state_checkpoints", "intermediate_states_buffer")


def test_what_is_written_may_not_require_a_gradient():
    for function, given, _ in sized(2, 4, 1, 2, 8, 6):
        for name in set(WRITTEN) & {name for name, value in given.items() if value is not None}:
            before = given[name].copy()
            leaf = torch.from_numpy(before.copy()).requires_grad_()
            with pytest.raises(ContractTypeError, match=f"^{name} requires a gradient, and paged_kv's operators"):
                function(**given | {name: leaf})
            assert np.array_equal(leaf.detach(), before)
            with torch.no_grad():
                function(**given | {name: leaf})


@pytest.mark.parametrize("more", [{}, {"disable_state_update": True}])
@pytest.mark.parametrize("call", [gated_delta_rule_decode, gated_delta_rule_decode_pretranspose])
def test_what_is_written_is_no_other_argument(call, more):
    """Nothing is written then: an output in the memory of a state."""
    if more and call is gated_delta_rule_decode:
        return
    step = Step(1)
    before = step.pool[:3] if call is not gated_delta_rule_decode else step.pool[:3].swapaxes(2, 3)
    state = np.array(before, order="C")
    with pytest.raises(ContractError, match="share"):
        call(*step.inputs(state), output=state.reshape(-1)[: 3 * 6 * V].reshape(3, 1, 6, V), **more)
    assert np.array_equal(state, before)


@pytest.mark.filterwarnings("error")
def test_gates_beyond_float32_and_nothing_to_do_say_nothing():
    step = Step(1)
    step.a[0], step.b[0], step.a_log[1] = 1e30, -1e30, 200
    assert np.isfinite(decode(a=step.a, b=step.b, A_log=step.a_log)[0]).all()
    assert np.isfinite(update(z=np.full((2, 4, V), -1e30, np.float32))).all()
    nothing = {name: np.ones((5, 2, 0), np.float32) for name in "qk"}
    assert not prefill(**nothing).any()
    assert prefill(v=np.ones((5, 2, 0), np.float32)).shape == (5, 2, 0)
