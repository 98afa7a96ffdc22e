"""Models with latent attention against Hugging Face transformers: pages of latents, experts, greedy texts."""

import pytest
import torch
import transformers
from max.dtype import DType

from support.families import (
    LATENT_CASES,
    NEW_TOKENS,
    PAGES,
    PROMPTS,
    assert_logits,
    engine_texts,
    make_cases,
    norm_error,
)
from support.llama_family import Member, load_family

PAGES_OF_5 = (5, 27 * len(PROMPTS))
MEMBERS = {
    "lite": (DType.float32, *PAGES),
    "lite, bfloat16": (DType.bfloat16, *PAGES),
    "v2": (DType.float32, *PAGES_OF_5),
    "v3": (DType.float32, *PAGES),
    "glm4_moe_lite": (DType.float32, *PAGES),
}
EXACT = [name for name, (dtype, *_) in MEMBERS.items() if dtype == DType.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_cases(LATENT_CASES, tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def models(folder):
    return load_family({name: Member(folder / name.split(",")[0], *sizes) for name, sizes in MEMBERS.items()})


@pytest.mark.parametrize("name", EXACT)
def test_logits_are_those_of_transformers(folder, models, name):
    assert_logits(models[name], folder / name, 1e-4)


def test_in_bfloat16_logits_are_near(folder, models):
    # 2 ** -8 for each of some twenty roundings in a row
    assert_logits(models["lite, bfloat16"], folder / "lite", 0.08, norm_error)


@pytest.mark.parametrize("name", ["lite", "v2"])
@pytest.mark.parametrize("max_step_tokens", [2048, 13])
def test_a_batch_of_prompts_in_chunks_gives_the_texts_of_transformers(folder, models, name, max_step_tokens):
    """Prompts prefill in pieces beside requests that decode; pages are reused as requests end."""
    texts = engine_texts(models[name], PROMPTS, NEW_TOKENS, max_step_tokens=max_step_tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        assert text == expected[0, len(prompt) :].tolist()


def test_a_page_holds_one_latent_a_token(models):
    assert models["lite"].page_bytes == 3 * 16 * (512 + 64) * 4
