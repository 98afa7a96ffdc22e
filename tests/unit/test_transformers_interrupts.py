"""Ctrl-C while a model of transformers is given this package's attention and linear layers, or is made as before."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin

from paged_kv.transformers import enable, enabled, linear, running, switch
from paged_kv.transformers.batching import on_blocks
from support.interrupts import interrupted_anywhere


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def state(model: Any) -> list[Any]:
    """All that is replaced. A hook that was being registered may stay, and does nothing."""
    modules = [module for module in model.modules() if "forward" in module.__dict__]
    replaced = GenerationMixin.generate, ContinuousBatchingManager.switch_to_cb_friendly_attn
    kept = [*switch._originals, *linear._running, *running._calls, torch.get_num_threads()]
    kept += [PreTrainedConfig._attn_implementation, continuous_api.PagedAttentionCache]
    return [*replaced, dict(ATTN_TYPE_TO_ALLOCATOR), model.config._attn_implementation, modules, *kept]


def use(model: Any) -> None:
    name = running.NAMES["int8"]
    with enabled("int8"), linear.replaced(model), running.as_named(model, name), on_blocks():
        assert model.config._attn_implementation == name
        assert any("forward" in module.__dict__ for module in model.modules())


def test_all_is_as_before_and_may_be_used_wherever_it_is_interrupted(model: Any) -> None:
    use(model)
    before = state(model)
    for _, place in interrupted_anywhere(lambda: model, use, 150):
        assert state(model) == before, f"after bytecode {place}"
    use(model)
    for _, place in interrupted_anywhere(lambda: None, lambda _: enable(), 60):
        enable()
        with enabled():  # which has nothing to do, then
            assert GenerationMixin.generate is not before[0], f"after bytecode {place}"
            assert ContinuousBatchingManager.switch_to_cb_friendly_attn is not before[1]
        switch.disable()
        assert state(model) == before
