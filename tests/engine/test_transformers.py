"""transformers' `generate` and `generate_batch` on pages: greedy tokens in float32 are those of transformers alone."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import paged_kv.transformers
from paged_kv import reference
from paged_kv.errors import ContractError, ShapeError, ToolchainError
from paged_kv.kv_formats import CODE_DTYPES, KVFormat
from paged_kv.transformers import PagedCache, linear, served
from paged_kv.transformers.batching import PagedBlocks
from paged_kv.transformers.cache import CACHE_ARGUMENT, PagedLayer
from paged_kv.transformers.served import why_not
from support import harness
from support.checkpoints import make_checkpoint
from support.decoding import load_variants
from support.limits import SECONDS, limited
from support.ports import free_ports

ROOT = Path(__file__).parents[2]
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "layer_types": WINDOWS, "sliding_window": 19}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen2": (
        "Qwen2ForCausalLM",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 21}),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 19, "layer_types": WINDOWS, "query_pre_attn_scalar": 50, "attn_logit_softcapping": 5.0},
    ),
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        {"sliding_window": 19, "layer_types": WINDOWS, "query_pre_attn_scalar": 50},
    ),
    "Phi3": ("Phi3ForCausalLM", {"num_attention_heads": 4, "head_dim": 16, "sliding_window": 40}),
    "Olmo2": ("Olmo2ForCausalLM", {"head_dim": 8}),
    "GptOss": ("GptOssForCausalLM", {"num_local_experts": 4, "intermediate_size": 32} | EXPERTS),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
}
PROMPTS = [np.random.default_rng(n).integers(2, 256, n).tolist() for n in (1, 2, 17, 32, 33, 100, 255, 300)]
RIGHT = torch.tensor([PROMPTS[4], PROMPTS[5][:33]])
NEW_TOKENS = 10
GREEDY = {"max_new_tokens": 5, "do_sample": False}
BLOCKS = ContinuousBatchingConfig(num_blocks=8, page_size=16)
TOLERANCE = 1e-3
"""The tolerance of the logarithm of a probability, in float32."""
INT4_TOLERANCE = 2e-3
"""The same over int4: sums in another order may move one code, which moved one of 80 logarithms by 0.0009 in one family
and 0.0011 in another; else they are within 1e-6."""


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()
    harness.code_libraries()


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    yield
    paged_kv.transformers.disable()
    served._warned.clear()


def make(family: str, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights, large enough that its attention decides."""
    torch.manual_seed(seed)
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**BASE | options | changes)
    model = getattr(transformers, name)(config).eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(6)
            if "sinks" in name:
                parameter.normal_()
    return model


def generate(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> Any:
    """`generate` over all prompts at once, padded on the left: the new tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(ids, attention_mask=mask, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)
    return found if options.get("return_dict_in_generate") else found[:, longest:]


def with_logprobs(model: Any) -> tuple[list[list[int]], np.ndarray]:
    """`generate`: the new tokens `[B, NEW_TOKENS]`, and the logarithm of each one's probability."""
    found = generate(model, output_logits=True, return_dict_in_generate=True)
    tokens = found.sequences[:, -NEW_TOKENS:]
    logprobs = torch.stack(found.logits, 1).float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    return tokens.tolist(), logprobs.numpy()


def generate_batch(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """The new tokens of `results_of_batch`."""
    return [result.generated_tokens for result in results_of_batch(model, prompts, **options)]


def results_of_batch(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Any]:
    """`generate_batch`, whose prompts come in parts of up to 40 tokens, beside decode rows."""
    config = GenerationConfig(
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    )
    batching = ContinuousBatchingConfig(num_blocks=140, max_batch_tokens=40, page_size=16, return_logprobs=True)
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert [result.error for result in results.values() if result.error] == []
    return list(results.values())


@contextmanager
def on_pages_alone(monkeypatch: pytest.MonkeyPatch, kv_format: KVFormat | None = None) -> Iterator[None]:
    """Enabled, and torch's attention raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's attention ran")

    with paged_kv.transformers.enabled(kv_format), monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
        yield


@contextmanager
def on_rounded_pages(monkeypatch: pytest.MonkeyPatch, kv_format: KVFormat) -> Iterator[None]:
    """Enabled, with pages of float32 that hold what NumPy's codes of K and V stand for: the oracle of `kv_format`."""
    update = PagedLayer.update

    def rounding(layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        heads = (np.ascontiguousarray(states.numpy()) for states in (keys, values))
        stored = (reference.widened(reference.quantised(x, kv_format)) for x in heads)
        return update(layer, *(torch.from_numpy(x.astype(np.float32)) for x in stored), *args, **kwargs)

    with paged_kv.transformers.enabled(), monkeypatch.context() as patched:
        patched.setattr(PagedLayer, "update", rounding)
        yield


def both_calls_give(model: Any, tokens: list[list[int]], logprobs: Any, tolerance: float = TOLERANCE) -> None:
    """`generate`'s result is the measure of both: transformers' own generate_batch drops Gemma 2's soft cap."""
    found_tokens, found = with_logprobs(model)
    batch = results_of_batch(model)
    assert found_tokens == tokens
    assert [result.generated_tokens for result in batch] == tokens
    np.testing.assert_allclose(found, logprobs, atol=tolerance, rtol=0)
    np.testing.assert_allclose([result.logprobs for result in batch], logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    before = model.config._attn_implementation
    expected = with_logprobs(model)
    with on_pages_alone(monkeypatch):
        both_calls_give(model, *expected)
    assert model.config._attn_implementation == before


@pytest.fixture(scope="module")
def gemma() -> Any:
    return make("Gemma3Text")


WAYS: dict[str, Callable[[Any], Any]] = {
    "beam search": lambda model: generate(model, num_beams=3),
    "several of the beams": lambda model: generate(model, num_beams=4, num_return_sequences=3, length_penalty=0.5),
    "prompts in parts": lambda model: generate(model, prefill_chunk_size=64),
    "a cache by its name": lambda model: generate(model, [PROMPTS[4]], cache_implementation="dynamic"),
    "a cache as in Gemma's files": lambda model: generate(model, [PROMPTS[4]], cache_implementation="hybrid"),
    "assisted": lambda model: generate(model, PROMPTS[4:5], assistant_model=make("Gemma3Text", seed=2)),
    "prompt lookup": lambda model: generate(model, [PROMPTS[5] * 2], prompt_lookup_num_tokens=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_decoding(way: str, gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = WAYS[way](gemma)
    with on_pages_alone(monkeypatch):
        assert WAYS[way](gemma).tolist() == expected.tolist()


def turns(model: Any, cache: Any) -> list[list[int]]:
    """`generate` twice, with one cache."""
    options = {"max_new_tokens": 5, "do_sample": False}
    first = model.generate(
        torch.tensor([PROMPTS[4]]), **{CACHE_ARGUMENT: cache}, return_dict_in_generate=True, **options
    )
    text = torch.cat([first.sequences, torch.tensor([PROMPTS[2]])], 1)
    found: list[list[int]] = model.generate(text, **{CACHE_ARGUMENT: first[CACHE_ARGUMENT]}, **options).tolist()
    return found


def with_holes(model: Any) -> list[list[int]]:
    """`generate` under a mask with holes."""
    mask = torch.ones(1, 33, dtype=torch.long)
    mask[0, 5:9] = 0
    ids = torch.tensor([PROMPTS[4]])
    found: list[list[int]] = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False).tolist()
    return found


def test_a_cache_is_used_again(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = turns(gemma, DynamicCache(config=gemma.config))
    with on_pages_alone(monkeypatch):
        assert turns(gemma, PagedCache(gemma.config)) == expected


@pytest.mark.parametrize("family", ["Gemma3Text", "Gemma2", "GptOss"])
def test_any_mask_is_computed(family: str) -> None:
    """Soft caps and sinks beside it too."""
    model, right = make(family), torch.tensor([[1] * 33, [1] * 20 + [0] * 13])
    calls = [with_holes, lambda model: model.generate(RIGHT, attention_mask=right, **GREEDY).tolist()]
    expected = [call(model) for call in calls]
    with paged_kv.transformers.enabled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [call(model) for call in calls] == expected


SECOND_TURNS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "more padding": lambda model, ids, given: model.generate(ids, attention_mask=padding(8, ids), **given),
    "a hole": lambda model, ids, given: model.generate(
        ids, attention_mask=padding(5, ids).index_fill(1, torch.tensor(9), 0), **given
    ),
    "no cache": lambda model, ids, given: model.generate(ids, attention_mask=padding(5, ids), use_cache=False, **given),
    "a forward pass": lambda model, ids, given: model(
        ids[:, -2:], attention_mask=padding(5, ids), **{CACHE_ARGUMENT: given[CACHE_ARGUMENT]}
    ).logits.argmax(-1),
}


def padding(tokens: int, ids: torch.Tensor) -> torch.Tensor:
    """A mask that hides the first tokens of the first of two sequences."""
    mask = torch.ones_like(ids)
    mask[0, :tokens] = 0
    return mask


@pytest.mark.parametrize("turn", SECOND_TURNS)
@pytest.mark.filterwarnings("ignore:paged_kv.transformers does not serve")
def test_a_cache_of_pages_is_a_cache_for_other_code_and_masks_too(turn: str, gemma: Any) -> None:
    found = []
    for call in (contextlib.nullcontext, paged_kv.transformers.enabled):
        with call(), torch.no_grad():
            first = gemma.generate(RIGHT, attention_mask=padding(5, RIGHT), return_dict_in_generate=True, **GREEDY)
            ids = torch.cat([first.sequences, RIGHT[:, :1]], 1)
            found.append(SECOND_TURNS[turn](gemma, ids, GREEDY | {CACHE_ARGUMENT: first[CACHE_ARGUMENT]}).tolist())
    assert found[0] == found[1]


def test_padding_that_was_not_stored_cannot_be_shown(gemma: Any) -> None:
    with paged_kv.transformers.enabled():
        first = gemma.generate(RIGHT, attention_mask=padding(5, RIGHT), return_dict_in_generate=True, **GREEDY)
        message = f"attention_mask: sequence 0 begins with 3 hidden tokens, expected at least 5: {CACHE_ARGUMENT}"
        with pytest.raises(ContractError, match=message):
            gemma.generate(
                first.sequences,
                attention_mask=padding(3, first.sequences),
                **{CACHE_ARGUMENT: first[CACHE_ARGUMENT]},
                **GREEDY,
            )


@pytest.mark.slow
def test_shared_prefixes_and_forks_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama")
    prompts = [PROMPTS[6] + PROMPTS[2], PROMPTS[6] + PROMPTS[3], PROMPTS[6][:200]]
    expected = generate(model, prompts).tolist()
    with on_pages_alone(monkeypatch):
        found = generate_batch(model, prompts, do_sample=True, top_k=1, num_return_sequences=2)
    assert found == [tokens for tokens in expected for _ in range(2)]


def test_threads_share_a_model(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [generate(gemma, [prompt]).tolist() for prompt in PROMPTS[3:6]]
    found: dict[int, Any] = {}
    with on_pages_alone(monkeypatch):
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: generate(gemma, [PROMPTS[3 + i]]).tolist()}))
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    assert [found[i] for i in range(3)] == expected
    assert not linear._running


@pytest.mark.parametrize("first", ["on pages", "plain"])
def test_a_call_goes_on_as_it_began(first: str) -> None:
    """The second call makes its masks while the first one runs, and attends after the first one has ended."""
    model = make("GptOss")  # its masks are made for one attention, and its sinks need it
    second = {"on pages": "plain", "plain": "on pages"}[first]
    expected = generate(model, [PROMPTS[4]]).tolist()
    with paged_kv.transformers.enabled():
        generate(model, [PROMPTS[4]])  # the model has been tried
    found: dict[str, Any] = {}
    begun, may_end = threading.Event(), threading.Event()

    def call(name: str) -> threading.Thread:
        paged_kv.transformers.enable() if name == "on pages" else paged_kv.transformers.disable()
        thread = threading.Thread(target=run, args=(name,), name=name)
        thread.start()
        return thread

    def run(name: str) -> None:
        found[name] = generate(model, [PROMPTS[4]], return_dict_in_generate=True)

    def hook(*_: Any) -> None:
        name = threading.current_thread().name
        if name == first:
            begun.set()
            assert may_end.wait(SECONDS)
        elif name == second:
            may_end.set()
            threads[0].join(timeout=SECONDS)

    hooked = model.model.layers[0].register_forward_pre_hook(hook)
    try:
        threads = [call(first)]
        assert begun.wait(SECONDS)
        threads.append(call(second))
        threads[1].join(timeout=SECONDS)
    finally:
        hooked.remove()
    assert {name: result.sequences[:, -NEW_TOKENS:].tolist() for name, result in found.items()} == {
        "on pages": expected,
        "plain": expected,
    }
    assert {name: type(result[CACHE_ARGUMENT]) for name, result in found.items()} == {
        "on pages": PagedCache,
        "plain": DynamicCache,
    }


def test_linear_layers_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("Llama", dtype=torch.bfloat16, hidden_size=512), torch.tensor([PROMPTS[4]])
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    applied = []
    multiply = linear.multiply
    monkeypatch.setattr(linear, "multiply", lambda x, w: applied.append(len(x)) or multiply(x, w))
    with on_pages_alone(monkeypatch):
        found = model.generate(ids, **options)
    # Two weights of a layer are large enough, and the head, which has one row of the prompt too; its 33 are torch's.
    assert set(applied) == {1}
    assert len(applied) == 1 + 2 * (3 * 2 + 1)
    with torch.no_grad():
        expected = model(found.sequences[:, :-1]).logits[0, -1].float()
    assert float((found.logits[-1][0].float() - expected).abs().max()) < 0.05 * float(expected.abs().max())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_that_is_not_served_says_so_once() -> None:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    with paged_kv.transformers.enabled():
        with pytest.warns(UserWarning, match="does not serve generate of T5.*: it has an encoder and cross attention"):
            assert model.generate(ids, max_new_tokens=3, do_sample=False).tolist() == expected.tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.generate(ids, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({CACHE_ARGUMENT: "DynamicCache"}, f"{CACHE_ARGUMENT} is a DynamicCache"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"use_cache": False}, "use_cache is False"),
        ({"attention_mask": torch.zeros(1, 17, dtype=torch.long)}, "attention_mask hides all tokens of a sequence"),
    ],
    ids=["a cache", "a kind of cache", "no cache", "nothing to see"],
)
def test_a_call_that_is_not_served(options: dict[str, Any], reason: str, gemma: Any) -> None:
    if CACHE_ARGUMENT in options:
        options = {CACHE_ARGUMENT: DynamicCache(config=gemma.config)}
    ids = torch.tensor([PROMPTS[2]])
    with paged_kv.transformers.enabled(), pytest.warns(UserWarning, match=reason):
        gemma.generate(ids, max_new_tokens=2, do_sample=False, **options)


def compiled(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled": (lambda model: model.compile(backend="eager"), "its attention is compiled by torch"),
    "a compiled forward": (compiled, "its attention is compiled by torch"),
    "a compiled layer": (lambda model: compiled(model.model.layers[1]), "its attention is compiled by torch"),
    "a layer in training": (lambda model: model.model.layers[1].train(), "dropout is 0.5"),
    "another window": (lambda model: setattr(model.config, "sliding_window", 5), "layer 0 forgets what is outside"),
    "a compiled MLP": (lambda model: compiled(model.model.layers[1].mlp), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_verdict_is_that_of_the_model_as_it_is(change: str) -> None:
    model, (make_change, reason) = make("Llama", attention_dropout=0.5), CHANGES[change]
    with paged_kv.transformers.enabled():
        assert why_not(model, "generate") is None
        make_change(model)
        assert (why_not(model, "generate") or "").startswith(reason)


class Streamed(list[Any]):
    """A streamer."""

    def put(self, value: torch.Tensor) -> None:
        self.append(value.tolist())

    def end(self) -> None:
        self.append("end")


def test_a_call_that_fails_before_its_first_token_is_left_to_transformers() -> None:
    """One layer's mask is dropped by a hook: pages do not hold the padding that it shows."""
    model = make("Llama")
    with paged_kv.transformers.enabled():
        assert why_not(model, "generate") is None
    model.model.layers[1].register_forward_pre_hook(
        lambda _, args, given: (args, given | {"attention_mask": None}), with_kwargs=True
    )

    def call(**more: Any) -> Any:
        torch.manual_seed(3)
        streamed = Streamed()
        tokens = model.generate(
            RIGHT, attention_mask=padding(5, RIGHT), max_new_tokens=5, do_sample=True, streamer=streamed, **more
        )
        return tokens.tolist(), streamed, torch.rand(1).item()

    expected = call()
    for cache in ({}, {CACHE_ARGUMENT: PagedCache(model.config)}):
        served._warned.clear()
        with paged_kv.transformers.enabled(), pytest.warns(UserWarning, match="sequence 0 begins with 0 hidden tokens"):
            assert call(**cache) == expected


def test_a_call_that_transformers_refuses_too_is_refused_in_its_words(gemma: Any) -> None:
    with paged_kv.transformers.enabled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(IndexError, match="index out of range"):
            gemma.generate(torch.tensor([[1, 10**6]]), **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", CODE_DTYPES)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_greedy_tokens_over_codes(family: str, kv_format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    with on_rounded_pages(monkeypatch, kv_format):
        expected = with_logprobs(model)
    with on_pages_alone(monkeypatch, kv_format):
        both_calls_give(model, *expected, INT4_TOLERANCE if kv_format == "int4" else TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_decoding_over_codes(way: str, gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_rounded_pages(monkeypatch, "int8"):
        expected = WAYS[way](gemma)
    with on_pages_alone(monkeypatch, "int8"):
        assert WAYS[way](gemma).tolist() == expected.tolist()


@pytest.mark.slow
def test_a_cache_of_codes_is_used_again_and_widened_under_a_mask_with_holes(
    gemma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_rounded_pages(monkeypatch, "int4"):
        expected = turns(gemma, PagedCache(gemma.config)), with_holes(gemma)
    with on_pages_alone(monkeypatch):  # a cache keeps its own format
        found = turns(gemma, PagedCache(gemma.config, "int4"))
    with paged_kv.transformers.enabled("int4"):
        assert (found, with_holes(gemma)) == expected


@pytest.mark.slow
def test_pages_of_codes_take_fewer_bytes() -> None:
    model, stored = make("Llama"), {None: 24 * 4, "int8": 24 + 4, "int4": 24 // 2 + 4}  # bytes of a head
    prompt = torch.tensor([PROMPTS[5]])
    batching = ContinuousBatchingConfig(num_blocks=140, max_batch_tokens=40, page_size=16)
    for kv_format, head in stored.items():
        cache = PagedCache(model.config, kv_format)
        with paged_kv.transformers.enabled(kv_format):
            model.generate(prompt, **{CACHE_ARGUMENT: cache}, max_new_tokens=2, do_sample=False)
            with model.continuous_batching_context_manager(continuous_batching_config=batching) as manager:
                blocks = manager.batch_processor.cache
        pages = cache.layers[0].k_pages
        assert pages.nbytes == len(pages) * 32 * 2 * head
        block = 3 * 2 * 16 * 2 * head  # layers, K and V, tokens, heads
        assert 140 <= blocks.num_blocks <= 144
        assert blocks.cache_tensor.nbytes == blocks.num_blocks * block + 2 * blocks.bytes_per_sector


def test_codes_that_there_are_not_are_refused() -> None:
    generate_of, model = transformers.GenerationMixin.generate, make("Qwen2")
    before, ids = model.config._attn_implementation, torch.tensor([[5, 6, 7]])
    with pytest.raises(ContractError, match="kv_format: expected None or 'int8' or 'int4', got 'int2'"):
        paged_kv.transformers.enable("int2")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"kv_format: expected .* got 4"):
        PagedCache(model.config, 4)  # type: ignore[arg-type]
    assert transformers.GenerationMixin.generate is generate_of
    with paged_kv.transformers.enabled("int4"):
        for call in (lambda: model.generate(ids, max_new_tokens=2), lambda: generate_batch(model, [[5, 6, 7]])):
            with pytest.raises(ShapeError, match=r"kv_format: head_dim: expected .* 16 on for int4 codes, got 8"):
                call()
    assert model.config._attn_implementation == before
    assert not linear._running


@pytest.mark.slow
def test_each_call_has_its_own_format() -> None:
    model = make("Llama")
    paged_kv.transformers.enable()
    with model.continuous_batching_context_manager(continuous_batching_config=BLOCKS) as manager:
        paged_kv.transformers.enable("int8")
        assert generate(model, [[5, 6]], return_dict_in_generate=True)[CACHE_ARGUMENT].kv_format == "int8"
        assert manager.batch_processor.cache.dtype == torch.float32
    assert not linear._running


def test_disable_puts_everything_back() -> None:
    def state() -> list[Any]:
        manager = ContinuousBatchingManager
        allocators, cache = dict(ATTN_TYPE_TO_ALLOCATOR), continuous_api.PagedAttentionCache
        return [transformers.GenerationMixin.generate, manager.switch_to_cb_friendly_attn, allocators, cache]

    before = state()
    paged_kv.transformers.enable()
    paged_kv.transformers.enable()
    with paged_kv.transformers.enabled():
        assert state() != before
    assert state() != before  # it was enabled before
    paged_kv.transformers.disable()
    paged_kv.transformers.disable()
    assert state() == before


@pytest.mark.slow
def test_the_format_is_that_of_the_last_enable() -> None:
    model = make("Llama")

    def kv_format() -> Any:
        return generate(model, [[5, 6]], return_dict_in_generate=True)[CACHE_ARGUMENT].kv_format

    paged_kv.transformers.enable("int8")
    assert kv_format() == "int8"
    with paged_kv.transformers.enabled("int4"):
        assert kv_format() == "int4"
    assert kv_format() == "int8"
    paged_kv.transformers.enable()
    assert kv_format() is None
    with paged_kv.transformers.enabled("int4"):
        paged_kv.transformers.disable()
    with paged_kv.transformers.enabled():
        assert kv_format() is None


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["made enabled", "made disabled"])
def test_a_kept_manager_runs_as_it_was_made(first: bool) -> None:
    model = make("Llama")
    config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = []
    for is_enabled in (first, not first):
        paged_kv.transformers.enable() if is_enabled else paged_kv.transformers.disable()
        results = model.generate_batch(
            [[5, 6]], generation_config=config, continuous_batching_config=BLOCKS, persistent_manager=True
        )
        found.append([(result.error, result.generated_tokens) for result in results.values()])
    assert found[0] == found[1] == [(None, generate(model, [[5, 6]], max_new_tokens=2).tolist()[0])]
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    assert isinstance(cache, PagedBlocks) is first


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.25.0")
    with pytest.raises(ToolchainError, match=r"knows the internals of transformers 5\.23 and 5\.24, got 5\.25\.0"):
        paged_kv.transformers.enable()


CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.slow
def test_the_server_of_the_documentation(tmp_path: Path) -> None:
    """Its command to the letter, with attention of torch that raises, gives the text of the server alone."""
    documented = re.search(r'python -c "(.+)" \\\n +serve DIR (.+)\n', (ROOT / "docs/transformers.md").read_text())
    assert documented is not None
    code, options = documented.groups()
    make_checkpoint(tmp_path, max_position_embeddings=512)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT})
    )
    refusing = "import torch; torch.nn.functional.scaled_dot_product_attention = None; "
    alone = "from transformers.cli.transformers import main; main()"
    texts = [answers(tmp_path, program, options.split()) for program in (refusing + code, alone)]
    assert texts[0] == texts[1]
    assert all(map(len, texts[0]))


def answers(folder: Path, program: str, options: list[str]) -> list[str]:
    """Two texts of `transformers serve`, run by a line of Python."""
    port, _ = free_ports()
    command = [sys.executable, "-c", program, "serve", str(folder), *options, "--port", str(port)]
    log = folder / "log"
    with log.open("wb") as output, limited(subprocess.Popen(command, stdout=output, stderr=output)) as server:
        url = f"http://localhost:{port}"
        try:
            while True:
                assert server.poll() is None, log.read_text()
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.2)
            return [answer(url, str(folder), "the sea " * repeats) for repeats in (1, 20)]
        finally:
            server.terminate()


def answer(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as found:
        text: str = json.loads(found.read())["choices"][0]["message"]["content"]
    return text
