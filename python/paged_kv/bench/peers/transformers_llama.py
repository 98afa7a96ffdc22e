"""Hugging Face transformers on the same weights, in the same memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from paged_kv.arrays.host import as_numpy
from paged_kv.bench.peer import Peer, torch_view
from paged_kv.bench.problems import Array, bits
from paged_kv.bench.steps import StepProblem, llama_config


class TransformersStep(Peer):
    """`LlamaForCausalLM` with its default attention (SDPA) and its default growing cache."""

    name, packages = "Hugging Face transformers", ("torch", "transformers")

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        import torch
        from transformers.models.llama import modeling_llama

        transformers: Any = import_module("transformers")
        rotary: Any = modeling_llama.LlamaRotaryEmbedding
        case = problem.case
        config = transformers.LlamaConfig(**llama_config(case), attn_implementation="sdpa")
        with torch.device("meta"):
            model: Any = transformers.LlamaForCausalLM(config)
        weights = {name: torch_view(array) for name, array in problem.weights.items()}
        model.load_state_dict(weights, assign=True)
        model.model.rotary_emb = rotary(config)  # its frequencies are no weights
        self._model: Any = model.eval()
        self._torch: Any = torch
        self._context = case.context
        self._cache: Any = transformers.DynamicCache(config=config)
        for layer in range(case.layers if case.context else 0):
            k, v = (
                torch_view(np.ascontiguousarray(bits(array[layer]).swapaxes(1, 2)).view(array.dtype))
                for array in (problem.k, problem.v)
            )
            self._cache.update(k, v, layer)
        self._new: Any = lambda: transformers.DynamicCache(config=config)
        self._tokens = torch.from_numpy(problem.tokens.astype(np.int64))

    def run(self, i: int) -> None:  # noqa: ARG002
        if not self._context:
            self._cache = self._new()
        with self._torch.inference_mode():
            self._logits = self._model(
                self._tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            if self._context:
                self._cache.crop(-self._tokens.shape[1])  # keeps a view: the next step finds the same context

    def output(self) -> Array:
        return as_numpy(self._logits, "logits")
