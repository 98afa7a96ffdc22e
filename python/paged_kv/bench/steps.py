"""Whole steps of a Llama or a Qwen3-MoE of random weights, plain or in GGUF's blocks: the problem, and this package."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from max.dtype import DType

from paged_kv import reference
from paged_kv.bench.blocks import random_blocks
from paged_kv.bench.ours import Ours, page_table
from paged_kv.bench.problems import Array, Problem, bits, normal, relative_error
from paged_kv.bench.weight_cases import StepCase
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.mixture import Experts
from paged_kv.graphs.rope import Rope

STEP_TOLERANCE = 0.05
"""The error of a model's logits that is allowed: bfloat16 rounds between any two of its operations."""

RMS_EPS = 1e-5
ROPE_THETA = 10000.0
"""The base of the rotary frequencies of a step's model."""
BLOCKS_TOLERANCE = 0.1
"""The error of logits where weights are in blocks: x is rounded to int8 for their products, which the oracle does not
do."""
MIXTURE_TOLERANCE = 0.3
"""The same of a mixture: where two experts are nearly as good, that rounding chooses."""
_LINE = 64  # bytes, at whose multiples matrices of blocks begin


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


def encodings_of(case: StepCase) -> dict[str, Encoding]:
    """The encodings of the matrices that are in blocks, by their names."""
    encodings = {name: case.encoding(name) for name in case.matrices}
    return {name: encoding for name, encoding in encodings.items() if encoding is not None}


class StepProblem(Problem):
    """A model of random weights, what its requests have cached, and their next tokens."""

    def __init__(self, case: StepCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        blocks = STEP_TOLERANCE if case.file_type is None else BLOCKS_TOLERANCE
        self.tolerance = MIXTURE_TOLERANCE if case.experts else blocks
        self.tokens = rng.integers(0, case.vocab, (case.batch, case.tokens)).astype(np.int32)
        self.prompt = rng.integers(0, case.vocab, case.context).astype(np.int32)
        """For systems whose cache can only be filled by running the model; all requests get the same."""
        self.weights: dict[str, Array] = {}
        self._shapes, self._encodings = case.shapes(), encodings_of(case)
        self.memory = self._fill(rng) if case.file_type is None else self._fill_blocks(rng)
        """All matrices, one after the other."""
        kv = (case.layers, case.batch, case.context, case.kv_heads, case.head_dim)
        self.k, self.v = (normal(rng, kv, case.dtype, scale) for scale in (1.0, 0.25))

    def _fill(self, rng: np.random.Generator) -> Array:
        """Makes the weights, and returns their memory."""
        memory = np.empty(sum(map(math.prod, self._shapes.values())), np.dtype(self.case.dtype))
        # One block of noise serves all, from another place each: a billion numbers would take a minute.
        noise = rng.standard_normal(2**24, dtype=np.float32)
        begin = 0
        for name, shape in self._shapes.items():
            weight = memory[begin : begin + math.prod(shape)].reshape(shape)
            begin += weight.size
            _fill_weight(weight, rng, noise)
            self.weights[name] = weight
        return memory

    def _fill_blocks(self, rng: np.random.Generator) -> Array:
        """Makes matrices of blocks `[..., N, bytes]`; norms and routers in float32. Blocks come from one row of them,
        each matrix from another place; its length is prime, so that no two rows of a matrix are equal.
        """
        case, shapes = self.case, self._shapes
        sizes = {
            name: math.prod(shapes[name][:-1]) * case.row_bytes(name, shapes[name][-1]) for name in self._encodings
        }
        memory = np.empty(sum(-(-size // _LINE) * _LINE for size in sizes.values()), np.uint8)
        self._rows = {encoding: random_blocks(encoding, rng, 16381, 256) for encoding in set(self._encodings.values())}
        self._starts = {name: int(rng.integers(16381)) for name in sizes}
        begin = 0
        for name, shape in shapes.items():
            if name not in sizes:
                plain = rng.standard_normal(shape, dtype=np.float32)
                norm = len(shape) == 1
                self.weights[name] = 1 + np.float32(0.1) * plain if norm else np.float32(shape[-1] ** -0.5) * plain
                continue
            weight = memory[begin : begin + sizes[name]]
            begin += -(-weight.size // _LINE) * _LINE
            weight[:] = self._taken(name, 0).reshape(-1)
            self.weights[name] = weight.reshape(*shape[:-1], -1)
        return memory

    def _taken(self, name: str, what: int, expert: int | None = None) -> Array:
        """Return what a matrix, or one of a stack, takes for 256 elements each of the row: its bytes (0) or its
        values (1).
        """
        row, shape = self._rows[self._encodings[name]][what], self._shapes[name]
        count = math.prod(shape if expert is None else shape[1:]) // 256
        start = self._starts[name] + (expert or 0) * count
        taken: Array = np.take(row, np.arange(start, start + count) % len(row), axis=0)
        return taken

    def values(self, name: str, expert: int | None = None) -> Array:
        """Return the numbers of a weight, or of one matrix of a stack."""
        name = f"{name}.weight"
        if name not in self._encodings:
            return self.weights[name] if expert is None else self.weights[name][expert]
        return self._taken(name, 1, expert).reshape(self._shapes[name] if expert is None else self._shapes[name][1:])

    def weight(self, name: str, expert: int | None = None) -> Array:
        """Return the numbers of a weight in float64."""
        return self.values(name, expert).astype(np.float64)

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
        names = ("gate", "up", "down")
        if not self.case.experts:
            return self.gated(h, *(self.weight(f"{at}.mlp.{name}_proj") for name in names))
        scores = h @ self.weight(f"{at}.mlp.gate").T
        chosen = np.argsort(-scores, axis=1)[:, : self.case.chosen]
        weights = np.exp(np.take_along_axis(scores, chosen, 1))
        weights /= weights.sum(1, keepdims=True)
        out = np.zeros_like(h)
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            matrices = (self.weight(f"{at}.mlp.experts.{name}_proj", expert) for name in names)
            out[rows] += weights[rows, places, None] * self.gated(h[rows], *matrices)
        return out

    def heads(self, h: Array, at: str) -> tuple[Array, Array, Array]:
        """Return q, k and v `[R, heads, D]` of a layer, before their rotation."""
        q, k, v = (
            (h @ self.weight(f"{at}.self_attn.{name}_proj").T).reshape(len(h), -1, self.case.head_dim)
            for name in ("q", "k", "v")
        )
        if self.case.experts:
            q, k = self.norm(q, f"{at}.self_attn.q_norm"), self.norm(k, f"{at}.self_attn.k_norm")
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


def decoder_config(case: StepCase) -> DecoderConfig:
    """Return the configuration of the model of a step."""
    sizes = llama_config(case)
    rope, eps = Rope(case.head_dim, sizes.pop("rope_theta")), sizes.pop("rms_norm_eps")
    encodings = tuple(encodings_of(case).items())
    config = DecoderConfig(
        **sizes,
        norm_eps=eps,
        rope=rope,
        bos_token_id=None,
        eos_token_ids=(),
        encodings=encodings,
        float32_activations=bool(encodings),
    )
    if not case.experts:
        return config
    layers = (True,) * case.layers
    experts = Experts(
        count=case.experts,
        chosen=case.chosen,
        inner=case.intermediate,
        layers=layers,
        sums_to_one=True,
        separate_gate_up=True,
    )
    return replace(config, qk_norm="head", experts=experts)


class OursStep(Ours):
    """`DecoderModel.step`: everything between a step's tokens and its logits, Python included."""

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        from paged_kv.engine.model import DecoderModel

        case = problem.case
        owned = [-(-(case.context + case.tokens) // case.page_size)] * case.batch
        dtype, pages = DType[case.dtype], sum(owned)
        self._model = DecoderModel(
            decoder_config(case), problem.weights, dtype=dtype, num_pages=pages, page_size=case.page_size
        )
        table = page_table(owned, np.random.default_rng(1))
        # [pages, 2, layers, page_size, Hk, D]
        blocks = bits(np.asarray(self._model.blocks))
        blocks[:] = 0
        whole = case.context // case.page_size
        for request, row in enumerate(table):
            for which, tokens in enumerate((problem.k, problem.v)):
                own = bits(tokens)[:, request].reshape(case.layers, whole, case.page_size, case.kv_heads, case.head_dim)
                blocks[row[:whole], which] = own.swapaxes(0, 1)
        self._step = (
            problem.tokens.tolist(),
            [case.context] * case.batch,
            [[int(page) for page in row] for row in table],
        )
        self.memory = problem.memory

    def run(self, i: int) -> None:  # noqa: ARG002
        self._logits = self._model.step(*self._step)

    def profile(self, runs: int) -> list[str]:
        """Raises ContractError where MAX runs the steps."""
        from paged_kv.runtime.profile_table import profile_lines

        profiles, began = self._model.profile_steps(), perf_counter()
        for _ in range(runs):
            self.run(0)
        seconds = perf_counter() - began
        self._model.end_profile()
        return profile_lines(profiles, seconds, "their inputs")

    def output(self) -> Array:
        return self._logits
