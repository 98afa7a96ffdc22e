"""The paged decode step against Hugging Face transformers, which runs each prompt alone and without pages."""

from dataclasses import dataclass
from functools import cached_property
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType

from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import Sampling
from paged_kv.engine.sampling import choose
from paged_kv.pool import pages_needed
from support.checkpoints import LLAMA3, make_checkpoint, relative_error
from support.llama_family import Member, load_family, poison

NEW_TOKENS = 64
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (33, 1, 700, 16, 3)]
TIE = 1e-5  # relative to the largest logit of the step: closer than this, either of two tokens is right

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 8}
# Heads per KV head, sizes of head and page, embeddings, frequencies and odd sizes, each with each other's company.
FLOAT32 = {
    "group4": (5, BASE | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "odd": (128, BASE | {"hidden_size": 54, "intermediate_size": 75, "num_attention_heads": 6, "head_dim": 40,
                         "num_key_value_heads": 2, "vocab_size": 263, "num_hidden_layers": 3, "rms_norm_eps": 0.1,
                         "rope_parameters": LINEAR}),
}  # fmt: skip
BFLOAT16 = "bfloat16"
SHARDED = "group4"


@dataclass
class Case:
    """One checkpoint, in our hands and in transformers'."""

    model: DecoderModel
    reference: transformers.LlamaForCausalLM

    @cached_property
    def expected(self) -> list[tuple[list[int], np.ndarray]]:
        """The greedy tokens after each prompt, and the logits `[NEW_TOKENS, vocab]` that they are taken from."""
        return [greedy(self.reference, prompt) for prompt in PROMPTS]

    @cached_property
    def one_step(self) -> "Run":
        """All prompts together, each prefilled whole."""
        return Run(self.model)


def read_reference(folder, dtype=torch.float32):
    """Read anew, for a model that was cast to bfloat16 once has lost digits of its rotary frequencies."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def greedy(reference, prompt):
    tokens, rows, past = list(prompt), [], None
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            new = tokens if past is None else tokens[-1:]
            out = reference(torch.tensor([new]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0, -1].numpy())
            tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], np.stack(rows)


class Spy:
    """A model as the engine sees it: records the steps, and may map pages to others of the storage."""

    def __init__(self, model, pages_of_storage=None):
        self.model = model
        self.config, self.page_size = model.config, model.page_size
        self.num_states = self.num_window_pages = 0
        self.num_pages = model.num_pages if pages_of_storage is None else len(pages_of_storage)
        self.pages_of_storage = pages_of_storage
        self.steps = []

    def copy_page(self, *_):
        raise AssertionError("no sample of these prompts forks")

    def step(self, tokens, cache_lengths, pages, *rest):
        self.steps.append([(len(new), cached) for new, cached in zip(tokens, cache_lengths, strict=True)])
        if self.pages_of_storage is not None:
            pages = [[int(self.pages_of_storage[page]) for page in owned] for owned in pages]
        return self.model.step(tokens, cache_lengths, pages, *rest)


class Run:
    """A greedy run of all prompts: tokens, logits and steps. The storage is full of NaN before it."""

    def __init__(self, model, pages_of_storage=None, **options):
        poison(model)
        spy = Spy(model, pages_of_storage)
        engine = Engine(spy, **options)
        self.tokens = [[] for _ in PROMPTS]
        self.logits = [[] for _ in PROMPTS]
        for prompt in PROMPTS:
            engine.add_request(prompt, Sampling(NEW_TOKENS, ignore_end=True))
        with patch("paged_kv.engine.engine.choose", self.choose):
            while not engine.is_idle:
                for output in engine.step():
                    self.tokens[output.request] += output.tokens
        self.steps = spy.steps

    def choose(self, logits, rows, histories):
        """The engine's sampler; keeps the logits of each prompt."""
        for row, history in zip(rows, histories, strict=True):
            request = PROMPTS.index(history.tokens[: history.prompt_length])
            self.logits[request].append(logits[row].copy())
        return choose(logits, rows, histories)


def pages_of(model, prompts):
    """The pages that prompts and their new tokens need."""
    return sum(pages_needed(len(prompt) + NEW_TOKENS - 1, model.page_size) for prompt in prompts)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    references, members = {}, {}
    settings = {name: (*setting, torch.float32) for name, setting in FLOAT32.items()}
    settings[BFLOAT16] = (16, BASE | {"num_key_value_heads": 2}, torch.bfloat16)
    for name, (page_size, overrides, dtype) in settings.items():
        shard = "30KB" if name == SHARDED else "5GB"
        make_checkpoint(folder / name, dtype=dtype, max_shard_size=shard, **overrides)
        references[name] = read_reference(folder / name)
        spare = -(-300 // page_size)
        pages = sum(-(-(len(prompt) + NEW_TOKENS - 1) // page_size) for prompt in PROMPTS) + spare
        members[name] = Member(folder / name, DType.bfloat16 if name == BFLOAT16 else DType.float32, page_size, pages)
    assert len(list((folder / SHARDED).glob("model-*.safetensors"))) > 2
    models = load_family(members)
    return {name: Case(models[name], references[name]) for name in members}


@pytest.fixture(params=FLOAT32)
def case(request, cases):
    return cases[request.param]


@pytest.mark.slow
def test_no_step_of_the_references_is_a_tie(case):
    """Else "the same tokens" would be luck: take another seed."""
    for _, logits in case.expected:
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert ((first - second) / np.abs(logits).max(axis=-1)).min() > TIE


def test_prefill_and_decode_logits_and_tokens_are_those_of_transformers(case):
    run = case.one_step
    assert run.steps[0] == [
        (len(prompt), 0) for prompt in sorted(PROMPTS, key=lambda prompt: len(prompt) > 1)
    ]  # prefill: one ragged step
    assert len(run.steps) == NEW_TOKENS
    for prompt, (tokens, logits), ours, got in zip(PROMPTS, case.expected, run.tokens, run.logits, strict=True):
        errors = [relative_error(a, b) for a, b in zip(got, logits, strict=True)]
        assert max(errors) < 1e-4, f"prompt of {len(prompt)}: step {int(np.argmax(errors))}"
        assert ours == tokens, f"prompt of {len(prompt)}"


def test_chunks_beside_decoding_requests_change_no_token(case):
    run = Run(case.model, max_step_tokens=64)
    assert run.tokens == [tokens for tokens, _ in case.expected]
    for (_, logits), got in zip(case.expected, run.logits, strict=True):
        assert relative_error(np.stack(got), logits) < 1e-4
    # The longest prompt came in pieces, while the others decoded.
    mixed = [
        step for step in run.steps if {(new > 1, cached > 0) for new, cached in step} == {(False, True), (True, True)}
    ]
    assert len(mixed) > 8
    assert all(sum(new for new, _ in step) <= 64 for step in run.steps)


def test_where_pages_lie_changes_no_bit(case):
    needed = pages_of(case.model, PROMPTS)
    assert case.model.num_pages > needed
    pages_of_storage = np.random.default_rng(0).permutation(case.model.num_pages)[:needed]
    run = Run(case.model, pages_of_storage)
    assert run.tokens == case.one_step.tokens
    for got, expected in zip(run.logits, case.one_step.logits, strict=True):
        np.testing.assert_array_equal(np.stack(got), np.stack(expected))


def test_a_request_alone_gets_the_logits_that_it_gets_in_company(case):
    """Each token's own position, and no other request's pages."""
    model = case.model
    prompt, (tokens, logits) = PROMPTS[0], case.expected[0]
    poison(model)
    pages = [range(pages_of(model, [prompt]))]
    for cached, token in enumerate(prompt[:-1]):
        model.step([[token]], [cached], pages)
    got = model.step([[prompt[-1]]], [len(prompt) - 1], pages)
    assert relative_error(got[0], logits[0]) < 1e-4
    got = model.step([tokens[:20]], [len(prompt)], pages)  # 20 tokens at once on top of a filled cache
    assert relative_error(got[0], logits[20]) < 1e-4


def test_a_step_gives_the_logits_after_each_of_the_last_tokens_that_are_wanted(case):
    """As drafts are judged: rows of a text that goes on, beside a prompt and a request of one token."""
    model, prompt, (tokens, logits) = case.model, PROMPTS[0], case.expected[0]
    poison(model)
    pages = np.random.default_rng(1).permutation(model.num_pages).tolist()
    own, other = pages[: pages_of(model, [prompt])], pages[pages_of(model, [prompt]) :]
    model.step([prompt], [0], [own])
    got = model.step([[5, 6, 7], tokens[:8], [9]], [0, len(prompt), 0], [other[:3], own, other[3:4]], [1, 6, 1])
    assert got.shape == (8, model.config.vocab_size)
    assert relative_error(got[1:7], logits[3:9]) < 1e-4
    (alone,) = model.step([[9]], [0], [other[3:4]])
    assert relative_error(got[7], alone) < 1e-5


def test_bfloat16_is_as_near_to_float32_as_transformers_own(cases):
    """Its own tokens, judged by transformers in float32 on the same (bfloat16) weights."""

    def errors(got, exact):
        return np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)

    case = cases[BFLOAT16]
    run, rounded = case.one_step, read_reference(case.reference.name_or_path, torch.bfloat16)
    for prompt, tokens, got in zip(PROMPTS, run.tokens, run.logits, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.no_grad():
            exact, theirs = (m(ids).logits[0, len(prompt) - 1 :].float().numpy() for m in (case.reference, rounded))
        ours = errors(np.stack(got), exact)
        assert ours.max() < 3e-2, f"prompt of {len(prompt)}: step {ours.argmax()}"
        assert ours.mean() < 1.25 * errors(theirs, exact).mean()


def test_a_page_outside_the_storage_is_refused(cases):
    model = cases["group4"].model
    with pytest.raises(ValueError, match="page"):
        model.step([[1, 2]], [0], [[model.num_pages]])
