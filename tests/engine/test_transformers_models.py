"""Models that `paged_kv.transformers` serves, and one for each reason to leave a model to transformers.

`python -m benchmarks.transformers_sweep` does the same with every decoder of transformers.
"""

import re
from collections.abc import Iterator

import pytest
import torch
from transformers.masking_utils import sdpa_mask

import paged_kv.transformers
from benchmarks.tiny_decoders import small_model
from benchmarks.transformers_sweep import outcomes
from paged_kv.transformers.attention import attention_mask
from paged_kv.transformers.cache import CACHE_ARGUMENT

OUTCOMES = {
    "gpt_oss": ("served", "served"),
    "nemotron": ("served", "it attends to other keys|its code does not hand on"),  # in transformers 5.23, and 5.24
    "gemma4_text": ("served", "its head_dim differs by layer"),
    "doge": ("its own code changes attention_mask",) * 2,
    "mimo_v2_flash": ("keys and values are 16 and 24 wide",) * 2,
    "diffllama": ("it attends to other keys or values than those of the cache that it is given",) * 2,
    "moshi": ("layer 0 forgets what is outside its window",) * 2,
    "gemma3n_text": ("it has layers of type dummy",) * 2,  # KV sharing
    "qwen3_next": ("it has layers of type linear_attention",) * 2,
    "deepseek_v2": (r"its attention is latent \(MLA\)",) * 2,
    "bloom": ("its attention cannot be replaced",) * 2,
}


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    yield
    paged_kv.transformers.disable()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OUTCOMES)
def test_a_model_is_served_with_the_same_tokens_or_left_alone(model_type: str) -> None:
    for found, expected in zip(outcomes(small_model(model_type)), OUTCOMES[model_type], strict=True):
        assert re.match(rf"({CACHE_ARGUMENT}: |its code )?({expected})", found), found


def test_code_that_reads_a_mask_gets_its_numbers() -> None:
    padding = torch.tensor([[False, True, True]])
    made = attention_mask(1, 3, 3, attention_mask=padding)
    expected = sdpa_mask(1, 3, 3, attention_mask=padding, allow_is_causal_skip=False)
    assert (made.shape, made.dtype, made.was_read) == (expected.shape, torch.bool, False)
    assert torch.equal(torch.where(made, 0.0, -1.0)[..., :2], torch.where(expected, 0.0, -1.0)[..., :2])
    assert made.was_read
