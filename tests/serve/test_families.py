"""Families behind MAX Serve: eight ragged prompts at once, each continued as transformers alone would.

The engine's tests check every family's step, and the server registers all of them by one rule
(`serve/architectures.py`): these here are the ones whose layers, windows or weights are of more than one kind.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support import serving

serving.require()

import torch  # noqa: E402
import transformers  # noqa: E402

from support.families import make_case  # noqa: E402

LENGTHS = (1, 3, 17, 40, 64, 100, 129, 180)  # a page has 128 tokens
NEW_TOKENS = 12
TIE = 1e-4  # relative to the largest logit of the step: closer than this, either of two tokens is right
FLAGS = ("--max-length", "256", "--max-batch-size", "8")
PIECES = ("--enable-prefix-caching", "--max-batch-input-tokens", "64")
WHOLE = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")

PROMPTS = [bytes(np.random.default_rng(length).integers(97, 123, length).tolist()).decode() for length in LENGTHS]


@pytest.fixture(scope="module", params=["qwen2", "phi3", "gemma3", "gpt_oss"])
def checkpoint(request, tmp_path_factory):
    """The folder of a checkpoint of the family, and the model as transformers reads it back."""
    folder = tmp_path_factory.mktemp("family")
    make_case(request.param, folder)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if request.param == "gpt_oss":  # transformers 5.12 does not read the constants of its units
        for layer in model.model.layers:
            layer.mlp.experts.alpha, layer.mlp.experts.limit = model.config.swiglu_alpha, model.config.swiglu_limit
    return folder, model


def complete_all(server):
    """The answers to all prompts, asked at the same time."""

    def complete(prompt):
        return server.client().completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [answer.choices[0].token_ids for answer in pool.map(complete, PROMPTS)]


def assert_greedy(folder, model, answers):
    """Each new token is the one that transformers finds the likeliest, or as likely as that to rounding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, new in zip(PROMPTS, answers, strict=True):
        assert len(new) == NEW_TOKENS
        text = tokenizer(prompt)["input_ids"] + new
        with torch.no_grad():
            logits = model(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:]
        chosen = logits[range(NEW_TOKENS), new]
        assert bool((logits.max(dim=-1).values - chosen <= TIE * logits.abs().max(dim=-1).values).all()), prompt


@pytest.mark.parametrize("flags", [PIECES, WHOLE], ids=["pieces, prefix cache", "whole, no cache"])
def test_greedy_tokens_are_those_of_transformers(checkpoint, tmp_path, flags):
    folder, model = checkpoint
    with serving.serving(folder, tmp_path / "log", "--quantization-encoding", "float32", *FLAGS, *flags) as server:
        answers = complete_all(server)
        assert_greedy(folder, model, answers)
        assert complete_all(server) == answers  # found in the prefix cache, where there is one


@pytest.mark.parametrize("checkpoint", ["gpt_oss"], indirect=True)
def test_bfloat16_runs(checkpoint, tmp_path):
    """Its logits are compared in tests/engine: of a text, one rounding may turn a word and all that follows."""
    folder, _ = checkpoint
    with serving.serving(folder, tmp_path / "log", "--quantization-encoding", "bfloat16", *FLAGS) as server:
        assert [len(new) for new in complete_all(server)] == [NEW_TOKENS] * len(PROMPTS)
