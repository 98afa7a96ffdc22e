"""The operands of a case, from a seed, and what a right answer is: the oracle's, in float64, over a sample of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the names bfloat16, float8_e4m3fn and float8_e5m2)
import numpy as np
import numpy.typing as npt

from paged_kv import reference
from paged_kv.bench.case_kinds import AppendCase, AttentionCase, Case, LinearCase, StepCase, named
from paged_kv.kv_formats import CODE_DTYPES, FORMATS
from paged_kv.options import stored_dtype, stored_head

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 2e-2}
TOLERANCE |= dict.fromkeys(CODE_DTYPES, 0.0)
"""Largest error of a result, relative to the norm of what it should be; of codes relative to what they stand for."""
STEP_TOLERANCE = 0.05
"""The error of a model's logits that is allowed: bfloat16 rounds between any two of its operations."""

RMS_EPS = 1e-5
ROPE_THETA = 10000.0
"""The base of the rotary frequencies of a step's model."""

_SAMPLED = 48  # (row, KV head) pairs of an attention result
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Problem(ABC):
    """One case with its operands."""

    tolerance: float

    @abstractmethod
    def error(self, output: Array) -> float:
        """Return the relative error of a run's output; infinite where the shape is wrong or a number is not finite."""


def problem_of(case: Case, seed: int = 0) -> Problem:
    """The operands of a case."""
    problem: Problem = named(case.problem)(case, seed)
    return problem


def bits(array: Array) -> Array:
    """The same memory as unsigned integers: NumPy copies those much faster than `ml_dtypes` elements."""
    return array.view(_BITS[array.itemsize])


def normal(rng: np.random.Generator, shape: Iterable[int], dtype: str, scale: float = 1.0) -> Array:
    """Normal numbers, drawn in blocks so that no large float32 array is needed."""
    out = np.empty(tuple(shape), np.dtype(dtype))
    flat = out.reshape(-1)
    for start in range(0, flat.size, 2**22):
        part = flat[start : start + 2**22]
        part[:] = (rng.standard_normal(part.size, dtype=np.float32) * np.float32(scale)).astype(out.dtype)
    return out


def stored_tokens(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> Array:
    """Normal tokens `[N, Hk, D]` as a cache stores them."""
    if dtype not in CODE_DTYPES:
        return normal(rng, shape, dtype)
    out = np.empty((*shape[:2], stored_head(dtype, shape[2])), np.dtype(stored_dtype(dtype)))
    for start in range(0, shape[0], 2**13):
        part = out[start : start + 2**13]
        part[:] = reference.quantised(normal(rng, (len(part), *shape[1:]), "float32"), dtype)
    return out


def numbers(tokens: Array) -> Array:
    """Return what stored tokens stand for."""
    return reference.widened(tokens) if tokens.dtype.name in FORMATS else tokens


def relative_error(got: Array, expected: Array) -> float:
    """Return the error relative to the norm; infinite for another shape, NaN or infinity."""
    if got.shape != expected.shape:
        return float("inf")
    error = float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


class AttentionProblem(Problem):
    """Contiguous tokens, from which every system builds its own storage."""

    def __init__(self, case: AttentionCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = max(TOLERANCE[case.dtype], TOLERANCE[case.kv_dtype])
        kv = (sum(case.lengths), case.kv_heads, case.head_dim)
        self.q = normal(rng, (len(case.lengths) * case.new_tokens, case.heads, case.head_dim), case.dtype)  # [R, Hq, D]
        self.k = stored_tokens(rng, kv, case.kv_dtype)  # [N, Hk, D], request after request
        self.v = stored_tokens(rng, kv, case.kv_dtype)
        self.indptr = np.concatenate([[0], np.cumsum(case.lengths)])  # [B + 1]
        self._rng = rng

    @property
    def row_lengths(self) -> npt.NDArray[np.int32]:
        """`[R]`: the tokens that each row sees."""
        n = self.case.new_tokens
        return (np.repeat(self.case.lengths, n) - np.tile(np.arange(n)[::-1], len(self.case.lengths))).astype(np.int32)

    @property
    def row_batch(self) -> npt.NDArray[np.int32]:
        """`[R]`: the request of each row."""
        return np.repeat(np.arange(len(self.case.lengths)), self.case.new_tokens).astype(np.int32)

    @cached_property
    def _expected(self) -> tuple[Array, Array, Array]:
        """Sampled rows, KV heads, and for each pair the output of the head's group `[group, D]` float64."""
        case = self.case
        chosen = self._rng.choice(
            len(self.q) * case.kv_heads, min(_SAMPLED, len(self.q) * case.kv_heads), replace=False
        )
        rows, heads = np.divmod(np.sort(chosen), case.kv_heads)
        q = self.q.reshape(len(self.q), case.kv_heads, -1, case.head_dim)  # [R, Hk, group, D]
        # Pages of one token, in their order.
        table = self.indptr[:-1, None] + np.arange(max(case.lengths))
        outputs = []
        for row, head in zip(rows, heads, strict=True):
            one, own = slice(row, row + 1), slice(head, head + 1)
            o, _ = reference.attention(
                *(q[one, head], numbers(self.k[:, None, own]), numbers(self.v[:, None, own]), table),
                *(self.row_batch[one], self.row_lengths[one]),
                rope_theta=case.rope_theta,
            )
            outputs.append(o[0])
        return rows, heads, np.stack(outputs)

    def error(self, output: Array) -> float:
        """`output` `[R, Hq, D]`."""
        if output.shape != self.q.shape:
            return float("inf")
        rows, heads, expected = self._expected
        grouped = output.reshape(len(self.q), self.case.kv_heads, -1, self.case.head_dim)
        return relative_error(grouped[rows, heads], expected)


class AppendProblem(Problem):
    """New tokens, `[N, Hk, D]` each of k and v, N = batch * tokens."""

    tolerance = 0.0

    def __init__(self, case: AppendCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        shape = (case.batch * case.tokens, case.kv_heads, case.head_dim)
        self.k, self.v = normal(rng, shape, case.dtype), normal(rng, shape, case.dtype)
        self.batch_indices = np.repeat(np.arange(case.batch), case.tokens).astype(np.int32)
        self.positions = np.tile(case.context + np.arange(case.tokens), case.batch).astype(np.int32)

    def error(self, output: Array) -> float:
        """`output` `[2, N, Hk, D]`: what the cache holds where the tokens belong."""
        expected = np.stack([self.k, self.v])
        if self.case.kv_dtype in CODE_DTYPES:
            expected = reference.quantised(expected, self.case.kv_dtype)
        return relative_error(output.astype(np.float64), expected.astype(np.float64))


class LinearProblem(Problem):
    def __init__(self, case: LinearCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = TOLERANCE[case.dtype]
        self.x = normal(rng, (case.rows, case.inner), case.dtype)
        self.w = normal(rng, (case.outer, case.inner), case.dtype, case.inner**-0.5)
        self._sample = np.sort(rng.choice(case.outer, min(512, case.outer), replace=False))

    @cached_property
    def _expected(self) -> Array:
        return self.x.astype(np.float64) @ self.w[self._sample].astype(np.float64).T

    def error(self, output: Array) -> float:
        """`output` `[rows, outer]`."""
        if output.shape != (self.case.rows, self.case.outer):
            return float("inf")
        return relative_error(output[:, self._sample], self._expected)


def llama_config(case: StepCase) -> dict[str, Any]:
    """The model of a step, by the names of Hugging Face's config.json."""
    return {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": case.intermediate,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "dtype": case.dtype,
    }


class StepProblem(Problem):
    """A model of random weights, what its requests have cached, and their next tokens."""

    tolerance = STEP_TOLERANCE

    def __init__(self, case: StepCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tokens = rng.integers(0, case.vocab, (case.batch, case.tokens)).astype(np.int32)
        self.prompt = rng.integers(0, case.vocab, case.context).astype(np.int32)
        """For systems whose cache can only be filled by running the model; all requests get the same."""
        self.weights: dict[str, Array] = {}
        self.memory = self._fill(rng)
        """All matrices, one after the other."""
        kv = (case.layers, case.batch, case.context, case.kv_heads, case.head_dim)
        self.k, self.v = (normal(rng, kv, case.dtype, scale) for scale in (1.0, 0.25))

    def _fill(self, rng: np.random.Generator) -> Array:
        """Makes the weights, and returns their memory."""
        shapes = self.case.shapes()
        memory = np.empty(sum(map(math.prod, shapes.values())), np.dtype(self.case.dtype))
        # One block of noise serves all, from another place each: a billion numbers would take a minute.
        noise = rng.standard_normal(2**24, dtype=np.float32)
        begin = 0
        for name, shape in shapes.items():
            weight = memory[begin : begin + math.prod(shape)].reshape(shape)
            begin += weight.size
            _fill_weight(weight, rng, noise)
            self.weights[name] = weight
        return memory

    def values(self, name: str) -> Array:
        """Return the numbers of a weight."""
        return self.weights[f"{name}.weight"]

    def weight(self, name: str) -> Array:
        """Return the numbers of a weight in float64."""
        return self.values(name).astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        """Return the RMS norm of the last axis of x."""
        return self.weight(name) * x / np.sqrt((x * x).mean(-1, keepdims=True) + RMS_EPS)

    def gated(self, h: Array, gate: Array, up: Array, down: Array) -> Array:
        """Return a SwiGLU unit of h `[R, hidden]`."""
        inner = h @ gate.T
        out: Array = (inner / (1 + np.exp(-inner)) * (h @ up.T)) @ down.T
        return out

    def mlp(self, h: Array, at: str) -> Array:
        """Return what a layer adds to x after its attention."""
        return self.gated(h, *(self.weight(f"{at}.mlp.{name}_proj") for name in ("gate", "up", "down")))

    def heads(self, h: Array, at: str) -> tuple[Array, Array, Array]:
        """Return q, k and v `[R, heads, D]` of a layer, before their rotation."""
        q, k, v = (
            (h @ self.weight(f"{at}.self_attn.{name}_proj").T).reshape(len(h), -1, self.case.head_dim)
            for name in ("q", "k", "v")
        )
        return q, k, v

    def logits(self, tokens: Array, k: Array, v: Array) -> Array:
        """Return the logits after the last of `tokens` `[B, T]`, after k and v `[layers, B, L, Hk, D]` (keys
        rotated): `[B, vocab]`.
        """
        batch, count = tokens.shape
        length = k.shape[2]
        requests = np.repeat(np.arange(batch), count)  # [R], R = B * T
        positions = np.tile(length + np.arange(count), batch)
        x = self.values("model.embed_tokens")[tokens.reshape(-1)].astype(np.float64)  # [R, hidden]
        for layer in range(self.case.layers):
            at = f"model.layers.{layer}"
            q, new_k, new_v = self.heads(self.norm(x, f"{at}.input_layernorm"), at)
            q, new_k = (reference.rope(array, positions, ROPE_THETA) for array in (q, new_k))
            # A page a request: [B, L + T, Hk, D].
            keys, values = (
                np.concatenate([cached[layer], new.reshape(batch, count, *new.shape[1:])], 1, dtype=np.float64)
                for cached, new in ((k, new_k), (v, new_v))
            )
            table = np.arange(batch)[:, None]
            o, _ = reference.attention(q, keys, values, table, requests, positions + 1)
            x = x + o.reshape(len(x), -1) @ self.weight(f"{at}.self_attn.o_proj").T
            x = x + self.mlp(self.norm(x, f"{at}.post_attention_layernorm"), at)
        return self.norm(x[count - 1 :: count], "model.norm") @ self.weight("lm_head").T

    @cached_property
    def _expected(self) -> Array:
        return self.logits(self.tokens, self.k, self.v)

    def error(self, output: Array) -> float:
        """`output` `[B, vocab]`: logits after the last token of each request."""
        return relative_error(output, self._expected)

    def short(self) -> Array:
        """A few tokens `[1, T]` for systems whose cache cannot be filled from outside: see `short_error`."""
        return self.prompt[None, :16] if self.case.context else self.tokens[:1, :16]

    def short_error(self, output: Array) -> float:
        """Return the error of the logits `[1, vocab]` after `short()` with nothing cached."""
        return relative_error(output, self.logits(self.short(), self.k[:, :1, :0], self.v[:, :1, :0]))


def _fill_weight(weight: Array, rng: np.random.Generator, noise: Array) -> None:
    """A norm scales around one; a matrix keeps the size of what it gets."""
    flat, scale = weight.reshape(-1), np.float32(weight.shape[-1] ** -0.5)
    for start in range(0, flat.size, 2**22):
        part = flat[start : start + 2**22]
        begin = rng.integers(0, noise.size - part.size)
        values = noise[begin : begin + part.size]
        part[:] = (1 + np.float32(0.1) * values if weight.ndim == 1 else scale * values).astype(weight.dtype)
