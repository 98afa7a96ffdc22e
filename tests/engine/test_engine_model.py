"""The engine around a model that is compiled: sharing, forks, aborts and few pages change no token (float32), over a
cache that is plain, rotated, or of codes.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Sample, Sampling
from paged_kv.errors import ContractError, RequestError
from paged_kv.graphs.models.config import with_cache_rotation
from support.checkpoints import make_checkpoint
from support.llama_family import Member, load_family, poison
from support.numpy_llama import NumpyLlama

PAGE_SIZE = 5
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 2}
SLOTS = 400
BYTES = {"int8": 20, "int4": 12}
"""The bytes of a head of 16 elements and its scale."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("engine") / "model"
    make_checkpoint(made, **SHAPE)
    return made


@pytest.fixture(scope="module")
def models(folder):
    """Without and with a rotation of q and k before the cache, and with codes in it."""
    size = (folder, DType.float32, PAGE_SIZE, SLOTS // PAGE_SIZE)
    members = {"model": Member(*size), "rotated": Member(*size, cache_rotation="hadamard")}
    return load_family(members | {kv_format: Member(*size, kv_format) for kv_format in BYTES})


@pytest.fixture
def model(models):
    return models["model"]


def run(engine, found):
    while not engine.is_idle:
        step(engine, found)
    assert engine.pool.num_used == 0


def step(engine, found):
    for output in engine.step():
        found[output.request, output.sample] += output.tokens
    engine.pool.check_integrity()


def asked(rng, count):
    """Prompts that begin alike, of greedy and of sampled requests."""
    prefixes = [rng.integers(0, 256, 60).tolist() for _ in range(4)]
    for _ in range(count):
        prompt = prefixes[rng.integers(4)][: rng.integers(1, 61)] + rng.integers(0, 256, rng.integers(0, 20)).tolist()
        temperature = float(rng.integers(0, 2))
        sampling = Sampling(int(rng.integers(1, 16)), temperature, seed=int(rng.integers(1000)), ignore_end=True)
        yield prompt, sampling, int(rng.choice([1, 1, 1, 2, 3]))


@pytest.mark.parametrize(("name", "count"), [("model", 100), ("int8", 30), ("int4", 30)])
def test_requests_that_share_get_the_tokens_that_each_gets_alone(models, name, count):
    model, rng = models[name], np.random.default_rng(PAGE_SIZE)
    poison(model)
    together, requests, aborted = defaultdict(list), list(asked(rng, count)), set()
    engine = Engine(model, max_step_tokens=64, max_running=16, num_pages=50)
    for prompt, sampling, n in requests:
        number = engine.add_request(prompt, sampling, n)
        if rng.integers(3):
            step(engine, together)
        if number % 19 == 7:
            try:
                engine.abort(number - 2)
                aborted.add(number - 2)
            except RequestError:  # it has ended
                pass
    run(engine, together)
    assert engine.preemptions > 0
    assert engine.tokens_found > 10 * count

    poison(model)
    alone, single = defaultdict(list), Engine(model, share_prefixes=False)
    for prompt, sampling, n in requests:
        for sample in range(n):
            # One sample at a time: sample i of a request draws from stream i.
            number = single.add_request(prompt, sampling)
            single._take_submitted()
            waiting = single._batching.waiting
            waiting[-1] = Sample(waiting[-1].request, sample, waiting[-1].tokens)
            run(single, alone)
            assert len(alone[number, sample]) == sampling.max_tokens
    expected = iter(alone.values())
    for number, (_, _, n) in enumerate(requests):
        for sample in range(n):
            tokens, whole = together[number, sample], next(expected)
            assert tokens == (whole[: len(tokens)] if number in aborted else whole), (number, sample)


@pytest.mark.parametrize("kv_format", BYTES)
def test_logits_over_codes_are_those_of_quantised_k_and_v(models, folder, kv_format):
    """Prefill of two requests, then tokens one by one. A K that lies near a tie may become the code beside it."""
    model, plain, oracle = models[kv_format], NumpyLlama(folder), NumpyLlama(folder, kv_format)
    assert model.page_bytes == 2 * model.config.num_hidden_layers * PAGE_SIZE * 2 * BYTES[kv_format]
    poison(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (33, 70)]
    pages = [list(range(10)), list(range(10, 30))]
    found = [model.step([prompt[:-3] for prompt in prompts], [0, 0], pages)]
    for i in (3, 2, 1):
        lengths = [len(prompt) - i for prompt in prompts]
        found.append(model.step([[prompt[-i]] for prompt in prompts], lengths, pages))
    for request, prompt in enumerate(prompts):
        ours = np.stack([logits[request] for logits in found])
        expected, unquantised = (llama.logits(prompt)[-4:] for llama in (oracle, plain))
        error, cost = np.abs(ours - expected).mean(), np.abs(expected - unquantised).mean()
        assert error < 0.1 * cost, f"{error} of what {kv_format} costs, {cost}"


def test_a_rotation_of_the_cache_changes_its_keys_and_no_logits(models):
    rng = np.random.default_rng(4)
    prompts, pages = [rng.integers(0, 256, n).tolist() for n in (33, 7)], [[9, 2, 5, 0, 11, 3, 8], [4, 6]]
    found = {}
    for name, model in ((name, models[name]) for name in ("model", "rotated")):
        poison(model)
        first = model.step(prompts, [0, 0], pages)
        found[name] = np.stack([first, model.step([[1], [2]], [33, 7], pages)]), model.blocks[pages[0]].copy()
    (logits, cache), (of_rotated, rotated) = found["model"], found["rotated"]
    assert np.abs(of_rotated - logits).max() < 1e-5 * np.abs(logits).max()
    dim = cache.shape[-1]
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / np.sqrt(dim)
    k, v = (rotated[:6, of] for of in (0, 1))
    assert np.abs(k - cache[:6, 0] @ signs).max() < 1e-5 * np.abs(k).max()
    assert np.abs(v - cache[:6, 1]).max() < 1e-5 * np.abs(v).max()


def test_pages_of_another_rotation_are_not_found_on_disk(models, tmp_path):
    prompt = list(range(40))
    for name, restored in (("model", 0), ("rotated", 0), ("rotated", 35)):
        engine = Engine(models[name], disk=DiskTier(tmp_path / "pages", 1 << 24))
        list(engine.stream(prompt, Sampling(1)))
        engine.flush()
        assert engine.tokens_restored == restored


@pytest.mark.parametrize(
    ("changes", "rotation", "words"),
    [
        ({}, "other", "cache_rotation: expected hadamard, got 'other'"),
        ({"head_dim": 24}, "hadamard", "needs a head_dim that is a power of two, not 24"),
        ({"latent": True}, "hadamard", "this model's cache holds latents"),
    ],
)
def test_a_rotation_that_a_model_cannot_have_is_refused(models, changes, rotation, words):
    with pytest.raises(ContractError, match=words):
        with_cache_rotation(replace(models["model"].geometry, **changes), rotation)
