"""Models from GGUF files against transformers, with the same weights and activations rounded as llama.cpp does."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from max.dtype import DType

from paged_kv.engine.model import DecoderModel
from support.gguf_files import make_model, q4_k_m, round_activations, write_gguf
from support.llama_family import Member, load_family, poison
from support.made import Made

PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (19, 1, 130, 2)]
NEW_TOKENS = 6
PAGE_SIZE = 16


ALL_GLOBAL = {"layer_types": ["full_attention"] * 7, "rope_parameters": {
    name: {"rope_type": "default", "rope_theta": 5e4} for name in ("full_attention", "sliding_attention")}}  # fmt: skip
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}


def plain(_):
    return "F32"


CASES = {
    "windows and YaRN": ("olmo3", {}, plain),
    "no windows": ("gemma3", ALL_GLOBAL, plain, {"drop": ["attention.sliding_window"]}),
    "linear, of 2023": ("llama", LINEAR, plain, {"metadata": {"llama.rope.scale_linear": 4.0}}),
    "no scale of scores": (
        "granite",
        {"attention_multiplier": 32**-0.5, "embedding_multiplier": 1.0},
        plain,
        {"drop": ["attention.scale"], "metadata": {"granite.embedding_scale": 0.0}},
    ),
    "q4_k_m": ("llama", {}, q4_k_m),
    "biases, tied": (
        "qwen2",
        {"tie_word_embeddings": True},
        lambda name: "F16" if "attn_q" in name else "Q4_0",
    ),
    "unrotated layers": ("smollm3", {}, plain),
    "fused, a grid": ("phi3", {}, lambda name: "IQ3_S" if "ffn_down" in name else "Q4_K"),
    "experts": ("qwen3moe", {}, lambda name: "Q6_K" if "down_exps" in name or "attn_v" in name else "Q4_K"),
    "latents": ("deepseek2", {}, lambda name: "F16" if "_k_b" in name or "_v_b" in name else "Q6_K"),
    "latents, older": ("deepseek2", {}, lambda name: "F16" if "_kv_b" in name else "Q6_K", {"unsplit": True}),
    "experts in MXFP4": ("gpt-oss", {}, lambda name: "MXFP4" if "exps" in name else "Q8_0"),
    "windows": ("gemma3", {}, lambda name: "BF16" if "token_embd" in name else "Q4_K" if "attn_q" in name else "Q6_K"),
}
"""Architecture, what differs in its configuration, the encoding of each matrix, and what differs in the file. For every
architecture tests/unit/test_gguf.py compares configuration and weights with those of the checkpoint. Three have the
encodings of one library."""


@dataclass
class Case:
    model: DecoderModel
    reference: torch.nn.Module


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def make(name):
        architecture, overrides, encoding_of, *written = CASES[name]
        reference = make_model(architecture, **overrides)
        file = write_gguf(folder / f"{name}.gguf", reference, encoding_of, **dict(*written))
        model = load_family({name: Member(file, DType.float32, PAGE_SIZE, 64)})[name]
        poison(model)
        round_activations(reference, dict(model.config.encodings))
        return Case(model, reference)

    return Made(make)


def run(case):
    """Each request's tokens, and the logits `[B, NEW_TOKENS, vocab]`: the prompts in one step, then a token a step."""
    tokens, logits = [list(prompt) for prompt in PROMPTS], []
    free = iter(np.random.default_rng(0).permutation(64).tolist())
    pages = [[next(free) for _ in range(-(-(len(prompt) + NEW_TOKENS) // PAGE_SIZE))] for prompt in PROMPTS]
    new, cached = tokens, [0] * len(tokens)
    for _ in range(NEW_TOKENS):
        logits.append(case.model.step(new, cached, pages).copy())
        cached = [len(sequence) for sequence in tokens]
        new = [[int(row.argmax())] for row in logits[-1]]
        tokens = [[*sequence, *token] for sequence, token in zip(tokens, new, strict=True)]
    return tokens, np.stack(logits, 1)


@pytest.mark.parametrize("name", CASES)
def test_logits(cases, name):
    """To float32's digits in a whole text, and in all texts until an activation lies between two int8: there the last
    bit of a sum decides, one element of one layer is a step off, and all that attends to its token is.
    """
    case = cases[name]
    tokens, logits = run(case)
    errors = []
    for sequence, found in zip(tokens, logits, strict=True):
        with torch.no_grad():
            expected = case.reference(torch.tensor([sequence[:-1]])).logits[0, -NEW_TOKENS:].numpy()
        errors.append((np.abs(found - expected).max(-1) / np.abs(expected).max(-1)).max())
        best = np.sort(expected, -1)
        clear = best[:, -1] - best[:, -2] > 0.05 * np.abs(expected).max(-1)
        np.testing.assert_array_equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert max(errors) < (0.05 if case.model.config.encodings else 1e-4)
    assert min(errors) < 1e-5


@pytest.mark.parametrize("unsplit", [False, True])
def test_heads_of_latents_in_blocks(tmp_path, unsplit):
    """Queries and sums of latents become int8 beside them, which transformers' products, of other sides, do not know:
    2 % of the largest logit. In older files the weights of keys are dequantised.
    """
    model = make_model("deepseek2")
    file = tmp_path / "a.gguf"
    write_gguf(file, model, lambda name: "Q8_0" if "v_b." in name or "k_b." in name else "F32", unsplit=unsplit)
    case = Case(load_family({"a": Member(file, DType.float32, PAGE_SIZE, 64)})["a"], model)
    poison(case.model)
    in_blocks = {name.split(".")[-2] for name, _ in case.model.config.encodings}
    assert in_blocks == {"v_up_proj", *(() if unsplit else ("k_up_proj",))}
    for sequence, found in zip(*run(case), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([sequence[:-1]])).logits[0, -NEW_TOKENS:].numpy()
        assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
