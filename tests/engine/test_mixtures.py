"""Mixtures of experts over pages of K and V: their steps against Hugging Face transformers, and greedy texts."""

import numpy as np
import pytest
from max.dtype import DType

from support.checkpoints import relative_error
from support.families import MIXTURE_CASES, NEW_TOKENS, PAGES, make_case, reference, run
from support.llama_family import Member, load_family

BFLOAT16 = ("gpt_oss",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURE_CASES:
        make_case(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    members = {name: Member(folder / name, DType.float32, *PAGES) for name in MIXTURE_CASES}
    members |= {f"{name}, bfloat16": Member(folder / name, DType.bfloat16, *PAGES) for name in BFLOAT16}
    return load_family(members)


@pytest.mark.parametrize("name", MIXTURE_CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(folder, models, name):
    texts, logits = run(models[name])
    for text, got, expected in zip(texts, logits, reference(folder / name, texts), strict=True):
        assert relative_error(got, expected) < 1e-4
        assert text[-NEW_TOKENS:] == expected.argmax(axis=-1).tolist()


@pytest.mark.parametrize("name", BFLOAT16)
def test_in_bfloat16_logits_are_near(folder, models, name):
    texts, logits = run(models[f"{name}, bfloat16"])
    for got, expected in zip(logits, reference(folder / name, texts), strict=True):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 0.08  # 2 ** -8 for each of some twenty roundings in a row
