"""The engine over caches of int8 and int4 codes: logits against NumPy, shared pages, prefix files."""

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Sampling
from paged_kv.errors import CheckpointError
from support.checkpoints import make_checkpoint
from support.llama_family import Member, load_family
from support.numpy_llama import NumpyLlama

PAGE_SIZE, PAGES = 5, 60
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 2}
BYTES = {"int8": 20, "int4": 12}
"""Of a head of 16 elements and its scale."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("codes") / "model"
    make_checkpoint(made, **SHAPE)
    return made


@pytest.fixture(scope="module")
def models(folder):
    return load_family({name: Member(folder, DType.float32, PAGE_SIZE, PAGES, name) for name in BYTES})


def answered(engine, *prompts):
    """The tokens of each prompt, all of them in one batch."""
    numbers = [engine.add_request(prompt, Sampling(9)) for prompt in prompts]
    found = {number: [] for number in numbers}
    while not engine.is_idle:
        for output in engine.step():
            found[output.request] += output.tokens
        engine.pool.check_integrity()
    return list(found.values())


@pytest.mark.parametrize("kv_format", BYTES)
def test_logits_are_those_of_quantised_k_and_v(models, folder, kv_format):
    """Prefill of two requests, then tokens one by one. A K that lies near a tie may become the code beside it."""
    model, plain, oracle = models[kv_format], NumpyLlama(folder), NumpyLlama(folder, kv_format)
    assert model.page_bytes == 2 * model.config.num_hidden_layers * PAGE_SIZE * 2 * BYTES[kv_format]
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


@pytest.mark.parametrize("kv_format", BYTES)
def test_samples_that_share_pages_get_the_tokens_that_each_gets_alone(models, kv_format):
    prompt = np.random.default_rng(1).integers(0, 256, 37).tolist()
    prompts = [prompt, prompt[:20], [*prompt[:28], 7, 8]]
    alone = [answered(Engine(models[kv_format]), p)[0] for p in prompts]
    engine = Engine(models[kv_format])
    assert [*answered(engine, *prompts), *answered(engine, prompts[2])] == [*alone, alone[2]]
    assert engine.tokens_found


def test_a_prefix_file_is_of_one_format(models, tmp_path):
    prompt = np.random.default_rng(2).integers(0, 256, 41).tolist()
    for kv_format, other in (("int8", "int4"), ("int4", "int8")):
        engine = Engine(models[kv_format])
        expected = answered(engine, prompt)
        path = tmp_path / kv_format
        assert engine.save_prefix(path, prompt) == 40
        restored = Engine(models[kv_format])
        assert restored.load_prefix(path) == 40
        assert answered(restored, prompt) == expected
        assert restored.tokens_found == 40
        with pytest.raises(CheckpointError, match=kv_format):
            Engine(models[other]).load_prefix(path)
