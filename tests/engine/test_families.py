"""Every family's step against Hugging Face transformers: the same weights, the whole text at once and without pages."""

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType

from paged_kv.errors import CheckpointError
from support.checkpoints import CONFIG, read_config, relative_error
from support.families import CASES, make_case
from support.llama_family import Member, load_family, poison

PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (33, 1, 120, 16)]
NEW_TOKENS = 8
PAGE_SIZE = 16
PAGES_EACH = 9
BFLOAT16 = ("llama", "olmo2", "gemma3")  # where norms stand in three ways


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for name in CASES:
        make_case(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    pages = PAGES_EACH * len(PROMPTS)
    members = {name: Member(folder / name, DType.float32, PAGE_SIZE, pages) for name in CASES}
    members |= {f"{name}, bfloat16": Member(folder / name, DType.bfloat16, PAGE_SIZE, pages) for name in BFLOAT16}
    return load_family(members)


def run(model):
    """Tokens of each prompt and its greedy continuation, and the logits `[NEW_TOKENS, vocab]` that it is taken from."""
    poison(model)
    pages = np.random.default_rng(0).permutation(model.num_pages).reshape(len(PROMPTS), -1).tolist()
    texts = [list(prompt) for prompt in PROMPTS]
    logits = [[] for _ in PROMPTS]
    lengths, new = [0] * len(PROMPTS), PROMPTS
    for _ in range(NEW_TOKENS):
        rows = model.step(new, lengths, pages)
        lengths = [len(text) for text in texts]
        for text, row, kept in zip(texts, rows, logits, strict=True):
            kept.append(row.copy())
            text.append(int(row.argmax()))
        new = [text[-1:] for text in texts]
    return texts, logits


def reference(folder, texts):
    """The logits of transformers for the same rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:].numpy() for text in texts]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(folder, models, name):
    texts, logits = run(models[name])
    for got, expected in zip(logits, reference(folder / name, texts), strict=True):
        assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("name", BFLOAT16)
def test_in_bfloat16_logits_are_near(folder, models, name):
    texts, logits = run(models[f"{name}, bfloat16"])
    for got, expected in zip(logits, reference(folder / name, texts), strict=True):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 0.05  # 2 ** -8 for each of some ten roundings in a row


def test_a_window_of_mistral_is_there_unless_it_is_null(tmp_path):
    """As transformers has it: the key is missing in the files of the first release."""
    mistral = {"architectures": ["MistralForCausalLM"]}
    layers = CONFIG["num_hidden_layers"]
    assert read_config(tmp_path / "missing", **mistral).windows == (4095,) * layers
    assert read_config(tmp_path / "null", **mistral, sliding_window=None).windows == ()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types = .*: a list of num_hidden_layers = 2"),
        ({"layer_types": ["full_attention", "mamba"]}, 'layer_types = "mamba": only "full_attention" and'),
        ({"hidden_activation": "relu"}, 'hidden_activation = "relu": only "gelu_pytorch_tanh" is supported'),
    ],
)
def test_what_gemma3_does_not_compute_is_refused(tmp_path, said, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path, architectures=["Gemma3ForCausalLM"], **said)
