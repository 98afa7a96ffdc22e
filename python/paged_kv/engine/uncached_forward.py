"""The forward pass of a plain decoder (Llama) in NumPy, without a cache: what the paged model must agree with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.errors import ContractError
from paged_kv.graphs.models.config import DecoderConfig

Array = npt.NDArray[Any]
Attend = Callable[[Array, Array, Array], Array]
"""q `[T, Hq, D]`, k and v `[T, Hk, D]`, q and k rotated -> o `[T, Hq, D]`; called for layer after layer."""


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Row t sees the tokens 0 to t; query head h reads KV head h // group."""
    o, group = np.empty_like(q), q.shape[1] // k.shape[1]
    hidden = ~np.tri(len(q), dtype=bool)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.dtype.type(q.shape[-1]))  # [T, T]
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o[:, head] = weights @ v[:, head // group] / weights.sum(axis=-1, keepdims=True)
    return o


def recompute(
    config: DecoderConfig,
    weights: Mapping[str, Array],
    tokens: Sequence[int] | Array,
    dtype: npt.DTypeLike = np.float64,
    attend: Attend = causal_attention,
) -> Array:
    """The logits after each token of one request, all positions at once: `[T]` token ids -> `[T, V]` of `dtype`.

    `weights` holds the tensors of `expected_tensors(config)`, of any dtype NumPy can cast. Row `t` predicts token
    `t + 1`, so one call checks a whole generated text. Another `attend` may change what a cache keeps, or look at it.

    Raises:
        ContractError: `tokens` is empty or holds an id outside the vocabulary, or the model is no plain decoder.
    """
    unusual = [f.name for f in fields(config) if f.default is not MISSING and getattr(config, f.name) != f.default]
    if unusual or config.rope.past() is not None or config.rope.amplitude != 1 or config.rope.dims != config.head_dim:
        raise ContractError(f"config: only plain decoders are recomputed ({', '.join(unusual) or 'rope'})")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ContractError(f"tokens: expected a non-empty list of ids below vocab_size = {config.vocab_size}")
    eps = config.norm_eps

    def weight(name: str) -> Array:
        array: Array = weights[f"{name}.weight"].astype(dtype)
        return array

    angles = np.arange(ids.size)[:, None, None] * config.rope.inverse_frequencies().astype(dtype)  # [T, 1, D / 2]
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    x = weights["model.embed_tokens.weight"][ids].astype(dtype)  # [T, hidden]
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        h = _rms_norm(x, weight(f"{layer}.input_layernorm"), eps)
        q, k, v = (
            (h @ weight(f"{layer}.self_attn.{name}_proj").T).reshape(ids.size, -1, config.head_dim) for name in "qkv"
        )
        o = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + o.reshape(ids.size, -1) @ weight(f"{layer}.self_attn.o_proj").T
        h = _rms_norm(x, weight(f"{layer}.post_attention_layernorm"), eps)
        gate, up = (h @ weight(f"{layer}.mlp.{name}_proj").T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{layer}.mlp.down_proj").T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits: Array = _rms_norm(x, weight("model.norm"), eps) @ weight(head).T
    return logits


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x / size * scale)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split: dimension i is paired with dimension i + D / 2."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
