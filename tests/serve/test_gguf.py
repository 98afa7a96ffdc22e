"""A GGUF file behind MAX Serve: the same tokens as transformers, which rounds activations as MAX's layers do."""

import json

import pytest

from support import serving

serving.require()

import torch  # noqa: E402

from paged_kv.checkpoint.gguf import open_gguf  # noqa: E402
from paged_kv.engine.demo import byte_tokenizer  # noqa: E402
from support.gguf_files import make_model, q4_k_m, round_activations, write_gguf  # noqa: E402

PROMPTS = ("once a prompt is longer than a page", "a", "shuffled " * 20)
NEW_TOKENS = 16
FLIP = 0.05
"""Relative to the largest logit: what an activation may do that lies between two int8."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a GGUF file, and the model of transformers that it was made of."""
    folder = tmp_path_factory.mktemp("gguf")
    reference = make_model("llama")
    file = write_gguf(folder / "model.gguf", reference, q4_k_m)
    round_activations(reference, dict(open_gguf(file).config.encodings))
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    reference.config.architectures = ["LlamaForCausalLM"]
    reference.config.save_pretrained(folder)
    return file, reference, tokenizer


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_greedy_tokens(model, tmp_path, cache):
    file, reference, tokenizer = model
    flags = ("--weight-path", str(file), "--quantization-encoding", "q4_k", "--kv-cache-format", cache)
    sizes = ("--max-length", "512", "--max-batch-size", "4", "--max-batch-input-tokens", "64")
    with serving.serving(file.parent, tmp_path / "log", *flags, *sizes, "--enable-prefix-caching") as server:
        answers = [
            server.client().completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            for prompt in PROMPTS
        ]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        new = answer.choices[0].token_ids
        text = tokenizer.encode(prompt).ids + new
        with torch.no_grad():
            logits = reference(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:]
        worse = (logits.max(-1).values - logits[range(NEW_TOKENS), new]) / logits.abs().max(-1).values
        assert len(new) == NEW_TOKENS
        assert worse.max() < FLIP
