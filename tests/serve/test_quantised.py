"""Quantised models behind MAX Serve: the same tokens as transformers, which rounds activations as the step does."""

import json

import pytest

from support import serving

serving.require()

import torch  # noqa: E402
import transformers  # noqa: E402

from paged_kv.checkpoint.source import open_source  # noqa: E402
from paged_kv.engine.demo import byte_tokenizer  # noqa: E402
from support.gguf_files import make_model, q4_k_m, round_activations, write_gguf  # noqa: E402
from support.packed_layers import quantise  # noqa: E402

PROMPTS = ("once a prompt is longer than a page", "a", "shuffled " * 20)
NEW_TOKENS = 16
FLIP = 0.05
"""Relative to the largest logit: what an activation may do that lies between two int8."""
SIZES = ("--max-length", "512", "--max-batch-size", "4", "--max-batch-input-tokens", "64", "--enable-prefix-caching")


def describe_tokenizer(folder):
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def assert_greedy(folder, log, reference, *flags):
    """A server's tokens are those that the model of transformers finds the likeliest, or nearly so."""
    with serving.serving(folder, log, *flags, *SIZES) as server:
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
        text = byte_tokenizer().encode(prompt).ids + new
        with torch.no_grad():
            logits = reference(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:]
        worse = (logits.max(-1).values - logits[range(NEW_TOKENS), new]) / logits.abs().max(-1).values
        assert len(new) == NEW_TOKENS
        assert worse.max() < FLIP


def write_model(folder, architecture, encoding_of):
    """A GGUF file, and the model of transformers that it was made of."""
    reference = make_model(architecture)
    file = write_gguf(folder / "model.gguf", reference, encoding_of)
    round_activations(reference, dict(open_source(file).config.encodings))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    describe_tokenizer(folder)
    reference.config.architectures = [type(reference).__name__]
    reference.config.save_pretrained(folder)
    return file, reference


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf"), "llama", q4_k_m)


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_gguf(gguf, tmp_path, cache):
    file, reference = gguf
    flags = ("--weight-path", str(file), "--quantization-encoding", "q4_k", "--kv-cache-format", cache)
    assert_greedy(file.parent, tmp_path / "log", reference, *flags)


MIXTURES = {
    "qwen3moe": lambda name: "Q6_K" if "down_exps" in name else "Q4_K",
    "gpt-oss": lambda name: "MXFP4" if "exps" in name else "Q8_0",
}
"""By architecture, the encoding of each matrix."""


@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures(tmp_path, architecture):
    file, reference = write_model(tmp_path, architecture, MIXTURES[architecture])
    flags = ("--weight-path", str(file), "--quantization-encoding", "q4_k", "--kv-cache-format", "float32")
    assert_greedy(tmp_path, tmp_path / "log", reference, *flags)


def test_packed_layers(tmp_path):
    """GPTQ's, which stay packed; the other formats differ in how they are read alone."""
    weights, tensors = quantise(tmp_path, "gptq 4 wide")
    encodings = dict(open_source(tmp_path).config.encodings)
    assert encodings == dict.fromkeys(weights, "INT4")
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    del config.quantization_config
    reference = transformers.LlamaForCausalLM(config).eval()
    tensors |= {name: torch.from_numpy(weight).float() for name, weight in weights.items()}
    reference.load_state_dict({name: tensors[name] for name in reference.state_dict()})
    round_activations(reference, encodings)
    describe_tokenizer(tmp_path)
    assert_greedy(tmp_path, tmp_path / "log", reference, "--quantization-encoding", "float32")
