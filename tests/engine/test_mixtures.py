"""Mixtures of experts over pages of K and V: their steps against Hugging Face transformers, and greedy texts."""

import pytest
from max.dtype import DType

from support.families import MIXTURE_CASES, PAGES, assert_logits, make_cases, norm_error
from support.llama_family import Member, load_family

BFLOAT16 = ("gpt_oss",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_cases(MIXTURE_CASES, tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def models(folder):
    members = {name: Member(folder / name, DType.float32, *PAGES) for name in MIXTURE_CASES}
    members |= {f"{name}, bfloat16": Member(folder / name, DType.bfloat16, *PAGES) for name in BFLOAT16}
    return load_family(members)


@pytest.mark.parametrize("name", MIXTURE_CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(folder, models, name):
    tokens, expected = assert_logits(models[name], folder / name, 1e-4)
    assert tokens == expected


@pytest.mark.parametrize("name", BFLOAT16)
def test_in_bfloat16_logits_are_near(folder, models, name):
    # 2 ** -8 for each of some twenty roundings in a row
    assert_logits(models[f"{name}, bfloat16"], folder / name, 0.08, norm_error)
