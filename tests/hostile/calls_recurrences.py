"""The calls of recurrent layers: valid ones, of sizes that may be 0, and what they must do.

Letters in shapes: B requests of T tokens, Hk heads of q and k, H of v and of states, K and V dimensions of keys and
values, S slots of states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Memory
from hostile.model import TOLERANCE, Expected, require
from hostile.parts import FLOATS, State, as_list, drawn, index_arrays, offsets, plain, tensors
from hostile.transforms import Arguments, Rng
from paged_kv.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose
from paged_kv.gdn_prefill import chunk_gated_delta_rule
from paged_kv.mamba import selective_state_update

STATES = ("float32", "bfloat16")
ORDINARY = 100.0
"""Requests with larger numbers are not compared: rows may cancel, and gates overflow."""


def walk(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, gates: np.ndarray, state: np.ndarray, delta: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs `[T, H, V]` of one request, and its states `[H, K, V]` after each row; gates are `[2, T, H]`."""
    o, states = np.zeros(v.shape), []
    repeats = v.shape[1] // k.shape[1]
    if not is_ordinary(q, k, v, gates, state):
        return np.full(v.shape, np.nan), [np.full(state.shape, np.nan)] * len(v)
    for t, (decay, rate) in enumerate(zip(*gates, strict=True)):
        query, key = (np.repeat(x[t], repeats, 0) for x in (q, k))
        state = state * decay[:, None, None]
        update = v[t] - np.einsum("hkv,hk->hv", state, key) if delta else v[t]
        state = state + key[:, :, None] * (rate[:, None] * update)[:, None]
        o[t] = np.einsum("hkv,hk->hv", state, query)
        states.append(state)
    return o, states


def float_of(given: Arguments, name: str, *shape: int | None, dtypes: Any = FLOATS) -> np.ndarray:
    return model.array(given[name], *shape, dtypes=dtypes).astype(np.float64)


def is_ordinary(*arrays: np.ndarray) -> bool:
    return all(bool((np.abs(x) < ORDINARY).all()) for x in arrays)


def sizes(rng: Rng) -> tuple[int, int, int, int, int, int]:
    """B, T, Hk, H, K and V."""
    key_heads = int(rng.integers(1, 3))
    b, t, group, k, v = (int(rng.choice(choice)) for choice in ([0, 1, 3], [0, 1, 3], [0, 1, 2], [0, 1, 8], [0, 5, 17]))
    return b, t, key_heads, key_heads * group, k, v


def expected_of(values: np.ndarray, view: np.ndarray) -> Expected:
    """A result: its rows may cancel, so that an error is measured by the largest number of all."""
    if not values.size:
        return Expected(values, view.dtype)
    reach = max(np.abs(np.where(np.isfinite(values), values, 0)).max(), 1e-30)
    with np.errstate(all="ignore"):
        share = reach / np.maximum(np.linalg.norm(np.nan_to_num(values), axis=-1), 1e-38)
    return Expected(values, view.dtype, max(1e-4, 2 * TOLERANCE[view.dtype.name]) * (1 + share))


def usual(*arrays: np.ndarray) -> float:
    """NaN for numbers whose squares float32 has not, else 1."""
    return 1.0 if is_ordinary(*arrays) else np.nan


def note(state: State, view: np.ndarray, values: np.ndarray) -> None:
    state.setdefault("written", []).append((view, expected_of(values, view)))


class NewTokens:
    """`gated_delta_rule_decode`, its call for states that are transposed, and `selective_state_update`."""

    def __init__(self, mode: str) -> None:
        self.name, self.is_scan, self.keys_first = mode, mode == "selective_state_update", mode.endswith("decode")

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        b, t, hk, h, k, v = sizes(rng)
        if self.is_scan and not h:
            hk = 1
        dtype, kept, slots = str(rng.choice(FLOATS)), str(rng.choice(STATES)), b + int(rng.integers(0, 3))
        at = rng.permutation(slots)[:b]
        if self.is_scan:
            found = {"x": (b, t, h, v), "dt": (b, t, h, v), "A": (h, v, k), "B": (b, t, hk, k), "C": (b, t, hk, k)}
            found |= {"D": (h, v)} | ({"z": (b, t, h, v)} if rng.random() < 0.5 else {})
            given = tensors(**{name: drawn(rng, memory, shape, dtype) for name, shape in found.items()})
            for name, axis in (("A", 1), ("dt", 3)):  # one number for each head
                view = given[name].view
                view[...] = -np.abs(view[(slice(None),) * axis + (slice(1),) * (view.ndim - axis)]) if view.size else 0
            given |= tensors(state=drawn(rng, memory, (slots, h, v, k), kept))
            given |= index_arrays(memory, state_batch_indices=at)
            outputs = {"out": ((b, t, h, v), dtype)}
        else:
            found = {"q": (b, t, hk, k), "k": (b, t, hk, k), "v": (b, t, h, v), "a": (b, t, h), "b": (b, t, h)}
            found |= {"A_log": (h,), "dt_bias": (h,)}
            given = tensors(**{name: drawn(rng, memory, shape, dtype) for name, shape in found.items()})
            outputs = {"output": ((b, t, h, v), dtype)}
            if self.keys_first:
                given |= tensors(state=drawn(rng, memory, (b, h, k, v), kept))
            elif rng.random() < 0.5:
                given |= plain(state=None) | tensors(initial_state=drawn(rng, memory, (slots, h, v, k), kept))
                given |= index_arrays(memory, initial_state_indices=at)
            else:
                given |= tensors(state=drawn(rng, memory, (b, h, v, k), kept))
            if not self.keys_first:
                outputs["intermediate_states_buffer"] = ((b, t, h, v, k), kept)
        for name, (shape, of) in outputs.items():
            if rng.random() < 0.5:
                given |= tensors(**{name: memory.new(shape, DTYPES[of])})
        return given | ({} if self.keys_first else plain(disable_state_update=bool(rng.random() < 0.3)))

    def steps(self) -> list[tuple[Any, Any]]:
        functions = gated_delta_rule_decode, gated_delta_rule_decode_pretranspose, selective_state_update
        function: Any = next(one for one in functions if one.__name__ == self.name)
        return [(lambda given, _: as_list(function(**given))[:1], self.expected)]

    def expected(self, given: Arguments, state: State) -> list[Expected]:
        first, out = ("x", "out") if self.is_scan else ("v", "output")
        shape = model.array(given[first], None, None, None, None, dtypes=FLOATS).shape
        b, t, h, v = shape
        pool = "initial_state" if "initial_state" in given else "state"
        require(pool == "state" or given["state"].value is None, "two states")
        held = model.array(given[pool], None, h, None, None, dtypes=STATES)
        keys, width = held.shape[2:] if self.keys_first else held.shape[:1:-1]
        require(width == v, "state")
        indices = "state_batch_indices" if self.is_scan else "initial_state_indices"
        slots = model.indices(given[indices], b) if indices in given else np.arange(b)
        require(indices in given or len(held) == b, "states")
        require(((slots >= -1) & (slots < len(held))).all(), "slots")
        busy = slots[slots >= 0]
        rows = self.scan_rows(given, shape, keys) if self.is_scan else self.rows(given, shape, keys)
        updates = self.keys_first or not model.truth(given["disable_state_update"].value)
        require(not updates or len(set(busy.tolist())) == len(busy), "a slot that two write")
        after, o = held.astype(np.float64), np.zeros(shape)
        between = np.zeros((b, t, *held.shape[1:]))
        kept = given.get("intermediate_states_buffer")
        if kept is not None and kept.value is not None:  # of requests that are padding it keeps its bits
            between[...] = model.array(kept, *between.shape, dtypes=STATES).astype(np.float64)
        for request, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            *one, gates, add, factor = (part[request] for part in rows)
            before = after[slot] if self.keys_first else after[slot].swapaxes(1, 2)
            found, states = walk(*one, gates, before, not self.is_scan)
            o[request] = (found + add) * factor
            if not is_ordinary(*one, gates, before, *states, o[request]):
                o[request], states = np.nan, [np.full_like(before, np.nan)] * t
            turned = np.array(states).reshape(t, h, keys, v)
            between[request] = turned if self.keys_first else turned.swapaxes(2, 3)
            if t and updates:
                after[slot] = between[request, -1]
        return self.written(given, state, (out, o), (pool, after, updates), between)

    def written(
        self,
        given: Arguments,
        state: State,
        output: tuple[str, np.ndarray],
        states: tuple[str, np.ndarray, bool],
        between: np.ndarray,
    ) -> list[Expected]:
        names = [(output[0], output[1], FLOATS), ("intermediate_states_buffer", between, STATES)]
        names += [(states[0], states[1], STATES)] if states[2] else []
        views = {}
        for name, values, dtypes in names:
            if name in given and given[name].value is not None:
                require(given[name].kind != "jax", "JAX arrays are constant")
                views[name] = model.array(given[name], *values.shape, dtypes=dtypes)
                note(state, views[name], values)
        others = [one.view for name, one in given.items() if name not in views and one.view is not None]
        floats = [view for view in others if "float" in view.dtype.name]
        model.written(*views.values(), others=tuple(floats))
        like = given[output[0]] if output[0] in views else given["x" if self.is_scan else "q"]
        return [expected_of(output[1], like.view)]

    def rows(self, given: Arguments, shape: tuple[int, ...], keys: int) -> list[Any]:
        """For each request q with its scale, k and v, its gates, and what follows its outputs."""
        b, t, h, _ = shape
        heads = model.array(given["q"], b, t, None, keys, dtypes=FLOATS).shape[2]
        require(heads and h % heads == 0, "heads")
        raw = q, k = [float_of(given, name, b, t, heads, keys) for name in "qk"]
        a, rate = (float_of(given, name, b, t, h) for name in "ab")
        log, bias = (float_of(given, name, h) for name in ("A_log", "dt_bias"))
        with np.errstate(all="ignore"):
            decay, rate = np.exp(-np.exp(log) * np.logaddexp(a + bias, 0)), 1 / (1 + np.exp(-rate))
            q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        gates = np.stack([decay, rate], 1) * usual(*raw, 10 * log, 10 * bias)
        return [q * (keys or 1) ** -0.5, k, float_of(given, "v", *shape), gates, np.zeros(b), np.ones(b)]

    def scan_rows(self, given: Arguments, shape: tuple[int, ...], keys: int) -> list[Any]:
        b, t, h, v = shape
        groups = model.array(given["B"], b, t, None, keys, dtypes=FLOATS).shape[2]
        require(groups and h % groups == 0, "groups")
        of_c, of_b = (float_of(given, name, b, t, groups, keys) for name in "CB")
        x, dt, rate = float_of(given, "x", *shape), float_of(given, "dt", *shape), float_of(given, "A", h, v, keys)
        for array in (dt.reshape(b * t * h, v), rate.reshape(h, v * keys)):
            require(np.array_equal(array, np.broadcast_to(array[:, :1], array.shape), equal_nan=True), "within a head")
        dt = dt[..., 0] if v else np.zeros((b, t, h))
        rate = rate[:, 0, 0] if v and keys else np.zeros(h)
        with np.errstate(all="ignore"):
            gates = np.stack([np.exp(rate * dt), dt], 1)
            factor = np.ones(shape)
            if "z" in given and given["z"].value is not None:
                z = float_of(given, "z", *shape)
                factor = np.where(np.abs(z) < ORDINARY, z / (1 + np.exp(-z)), np.nan)
        return [of_c, of_b, x, gates, float_of(given, "D", h, v) * x, factor]


class Prompts:
    """`chunk_gated_delta_rule`, with the states after every few rows."""

    name = "chunk_gated_delta_rule"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        b, _, hk, h, k, v = sizes(rng)
        h, every = h or hk, int(rng.integers(1, 3))
        lengths = rng.integers(0, 5, b)
        rows, kept, dtype = int(lengths.sum()), str(rng.choice(STATES)), str(rng.choice(FLOATS))
        given = tensors(**{name: drawn(rng, memory, (rows, hk, k), dtype) for name in "qk"})
        given |= tensors(v=drawn(rng, memory, (rows, h, v), dtype), beta=memory.put(rng.random((rows, h), np.float32)))
        given |= index_arrays(memory, cu_seqlens=offsets(lengths))
        given |= plain(use_qk_l2norm_in_kernel=True, output_final_state=True)
        if rng.random() < 0.5:
            given |= tensors(initial_state=drawn(rng, memory, (b, h, v, k), kept))
        if rng.random() < 0.6:
            places = offsets(lengths // every)
            given |= tensors(state_checkpoints=memory.new((int(places[-1]), h, v, k), DTYPES[kept]))
            given |= index_arrays(memory, checkpoint_cu_starts=places) | plain(checkpoint_every_n_tokens=every)
        for name, (shape, of) in {"output": ((rows, h, v), dtype), "output_state": ((b, h, v, k), kept)}.items():
            if rng.random() < 0.5:
                given |= tensors(**{name: memory.new(shape, DTYPES[of])})
        return given

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: as_list(chunk_gated_delta_rule(**given)), self.expected)]

    def expected(self, given: Arguments, state: State) -> list[Expected]:
        rows, hq, keys = model.array(given["q"], None, None, None, dtypes=FLOATS).shape
        hk, (_, hv, width) = given["k"].view.shape[1], model.array(given["v"], rows, None, None, dtypes=FLOATS).shape
        require(hq and hk == hq and hv and hv % hq == 0, "heads")
        q, k, v = float_of(given, "q", rows, hq, keys), float_of(given, "k", rows, hq, keys), float_of(given, "v")
        beta = np.ones((rows, hv))
        if given["beta"].value is not None:
            beta = float_of(given, "beta", rows, hv, dtypes=["float32"])
        ends = np.array([0, rows])
        if given["cu_seqlens"].value is not None:
            ends = model.indices(given["cu_seqlens"])
        require(len(ends) and ends[0] == 0 and (np.diff(ends) >= 0).all() and ends[-1] == rows, "cu_seqlens")
        shape, unusual = (len(ends) - 1, hv, width, keys), usual(q, k)
        before = np.zeros(shape)
        if "initial_state" in given and given["initial_state"].value is not None:
            before = float_of(given, "initial_state", *shape, dtypes=STATES)
        if model.truth(given["use_qk_l2norm_in_kernel"].value):
            with np.errstate(all="ignore"):
                q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        every = 0
        if "checkpoint_every_n_tokens" in given:
            every = model.count(given["checkpoint_every_n_tokens"].value)
        o, after, saved = np.zeros((rows, hv, width)), np.zeros(shape), [np.zeros((0, *shape[1:]))]
        for b, own in enumerate(map(slice, ends[:-1], ends[1:])):
            one = q[own] * (keys or 1) ** -0.5, k[own], v[own]
            gates = np.stack([np.ones_like(beta[own]), beta[own]]) * unusual
            o[own], states = walk(*one, gates, before[b].swapaxes(1, 2), delta=True)
            if not is_ordinary(*one, gates, before[b], *states):
                o[own], states = np.nan, [np.full((hv, keys, width), np.nan)] * len(states)
            turned = np.array([before[b].swapaxes(1, 2), *states]).swapaxes(2, 3)
            after[b] = turned[-1]
            saved.append(turned[every::every] if every else turned[:0])
        wanted = model.truth(given["output_final_state"].value)
        found = self.written(given, state, o, after if wanted else None, np.concatenate(saved), every)
        return found if wanted else found[:1]

    def written(
        self, given: Arguments, state: State, o: np.ndarray, after: np.ndarray | None, saved: np.ndarray, every: int
    ) -> list[Expected]:
        results, views = [("output", o, FLOATS), ("output_state", after, STATES)], {}
        checkpoints = given.get("state_checkpoints")
        require(bool(every) == (checkpoints is not None and checkpoints.value is not None), "checkpoints")
        if every:
            places = model.indices(given["checkpoint_cu_starts"])
            require(places[-1:].tolist() == [len(saved)], "places")
            held = model.array(checkpoints, None, *saved.shape[1:], dtypes=STATES)
            require(len(held) >= len(saved), "places")
            results.append(("state_checkpoints", np.concatenate([saved, held[len(saved) :].astype(float)]), STATES))
        for name, values, dtypes in results:
            if name in given and given[name].value is not None and values is not None:
                views[name] = model.array(given[name], *values.shape, dtypes=dtypes)
                note(state, views[name], values)
        others = [one.view for name, one in given.items() if name not in views and one.view is not None]
        model.written(*views.values(), others=tuple(view for view in others if "float" in view.dtype.name))
        found = [expected_of(o, given["output" if "output" in views else "q"].view)]
        if after is not None:
            kept = views["output_state"] if "output_state" in views else np.zeros(0, np.float32)
            found.append(expected_of(after, kept))
        return found
