"""The NumPy Llama of `paged-kv demo`, on a checkpoint: what a server's text is held against, or a cache of codes."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paged_kv import reference
from paged_kv.checkpoint.config import load_config
from paged_kv.engine.uncached_forward import causal_attention, recompute

NEAR_TIE = 1e-4
"""Between the log-probabilities of two tokens: float32 may take either."""


class NumpyLlama:
    """A checkpoint of one file, in float64."""

    def __init__(self, folder: Path, kv_format: str | None = None) -> None:
        """With `kv_format` K and V are what codes of "int8" or "int4" stand for."""
        self.kv_format = kv_format
        self.config, self.weights = load_config(folder), load_file(folder / "model.safetensors")

    def log_probabilities(self, tokens: list[int]) -> np.ndarray:
        """`[T, vocab]`: row `t` is the logarithm of each token's probability after `tokens[: t + 1]`."""
        logits = self.logits(tokens)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def assert_greedy(self, choice: Any) -> None:
        """Each token of a completion's or a chat's `choice` is the likeliest one after what stands before it.

        It was asked for with `return_token_ids`.
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
        return recompute(self.config, self.weights, tokens, attend=self._attend)

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        if self.kv_format is not None:
            k, v = (reference.widened(reference.quantised(kv, self.kv_format)) for kv in (k, v))
        return causal_attention(q, k, v)
