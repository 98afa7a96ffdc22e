"""A model of Hugging Face transformers on pages: `generate` and `generate_batch`, the tokens unchanged."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

import paged_kv.transformers

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=512, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()  # or LlamaForCausalLM.from_pretrained(...)

prompts = [torch.randint(1, 512, (length,)).tolist() for length in (40, 7, 100)]
greedy = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
pages = ContinuousBatchingConfig(num_blocks=64, page_size=16)  # without it, the cache takes most of the memory


def generate(prompt: list[int]) -> list[int]:
    """The new tokens of one prompt."""
    return model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()


def generate_batch() -> list[list[int]]:
    """The new tokens of all prompts, by continuous batching."""
    results = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=pages)
    return [result.generated_tokens for result in results.values()]


by_transformers = [generate(prompt) for prompt in prompts]
paged_kv.transformers.enable()
print("generate, the same tokens:", [generate(prompt) for prompt in prompts] == by_transformers)
print("generate_batch, the same tokens:", generate_batch() == by_transformers)
paged_kv.transformers.disable()
