"""A Llama forward pass in NumPy float64, straight from its definition: what a server's text is held against."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paged_kv import reference

NEAR_TIE = 1e-4
"""Between the log-probabilities of two tokens: float32 may take either."""


class NumpyLlama:
    """A checkpoint without rope scaling, whose head_dim is in its config.json."""

    def __init__(self, folder: Path, kv_format: str | None = None) -> None:
        """With `kv_format` K and V are what codes of "int8" or "int4" stand for."""
        self.kv_format = kv_format
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: w.astype(np.float64) for name, w in load_file(folder / "model.safetensors").items()}

    def log_probabilities(self, tokens: list[int]) -> np.ndarray:
        """`[T, vocab]`: row `t` is the logarithm of each token's probability after `tokens[: t + 1]`."""
        logits = self.logits(tokens)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def assert_greedy(self, choice: Any) -> None:
        """Each token of a completion's or a chat's `choice` is the likeliest one after what stands before it.

        It was asked for with `return_token_ids`, a field of MAX's own.
        """
        rows = self.rows_of(choice)
        chosen = rows[np.arange(len(rows)), choice.token_ids]
        np.testing.assert_array_less(rows.max(-1) - chosen, NEAR_TIE)

    def rows_of(self, choice: Any) -> np.ndarray:
        """`[generated, vocab]`: the log-probabilities that each generated token was taken from."""
        prompt, tokens = choice.prompt_token_ids, choice.token_ids
        return self.log_probabilities([*prompt, *tokens])[len(prompt) - 1 : -1]

    def logits(self, tokens: list[int]) -> np.ndarray:
        """`[T, vocab]`: row `t` is about the token after `tokens[: t + 1]`."""
        c, w = self.config, self.weights
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x = w["model.embed_tokens.weight"][tokens]  # [T, hidden]
        count = len(tokens)
        theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-np.arange(0, dim, 2) / dim)
        angles = np.arange(count)[:, None] * frequencies  # [T, dim / 2]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        future = np.triu(np.full((count, count), -np.inf), 1)
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            y = self._norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (
                (y @ w[f"{at}.self_attn.{name}_proj.weight"].T).reshape(count, -1, dim) for name in ("q", "k", "v")
            )
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            if self.kv_format is not None:
                k, v = (reference.widened(reference.quantised(kv, self.kv_format)) for kv in (k, v))
            k, v = (np.repeat(kv, heads // kv_heads, axis=1) for kv in (k, v))
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            o = np.einsum("hts,shd->thd", scores, v).reshape(count, heads * dim)
            x = x + o @ w[f"{at}.self_attn.o_proj.weight"].T
            y = self._norm(x, f"{at}.post_attention_layernorm.weight")
            gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        return self._norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name]


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
