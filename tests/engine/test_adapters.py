"""LoRA adapters in steps and requests: logits of the merged weights, each row its own adapter, prefixes apart."""

import json

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType

from paged_kv.engine import Engine, Sampling
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.model import DecoderModel
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.graphs.models.adapters import NO_ADAPTER, adaptable_layers
from support.adapters import merged, noise, write_peft
from support.checkpoints import make_checkpoint, relative_error
from support.families import make_cases, states_in_place
from support.gguf_files import make_model, q4_k_m, write_gguf
from support.llama_family import poison

CASES = ("llama", "gemma3", "phi3", "qwen3_5", "lite", "glm4_moe", "starcoder2")
"""Biases, windows and norms around, fused projections, a recurrence, latents, shared experts, an MLP without a gate."""
RANKS = {"wide": 21, "narrow": 3}
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (33, 1, 70, 16)]
TURN = ("wide", None, "narrow", "wide")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_merged_weights(case, tmp_path):
    folder = make_cases([case], tmp_path) / case
    model = DecoderModel.from_folder(folder, dtype=DType.float32, num_pages=36, page_size=16)
    references = {None: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)}
    for name, rank in RANKS.items():
        layers = noise(adaptable_layers(model.config), rank, rank)
        model.adapters.load(name, write_peft(tmp_path / name, layers, rank, 5.0))
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        references[name] = merged(reference, layers, 5.0 / rank)
    poison(model)
    pages = np.random.default_rng(0).permutation(36).reshape(4, 9).tolist()
    adapters = [NO_ADAPTER if name is None else model.adapters.of_name(name).index for name in TURN]
    texts, new, lengths = [list(prompt) for prompt in PROMPTS], PROMPTS, [0] * 4
    for _ in range(2):
        rows = model.step(new, lengths, pages, states=states_in_place(model, new, lengths), adapters=adapters)
        for name, text, row in zip(TURN, texts, rows, strict=True):
            with torch.no_grad():
                expected = references[name](torch.tensor([text])).logits[0, -1]
            assert relative_error(row, expected) < 1e-4, name
        lengths = [len(text) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row.argmax()))
        new = [text[-1:] for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    make_checkpoint(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    model = new_model(folder)
    for name, rank in RANKS.items():
        write_peft(folder / name, noise(adaptable_layers(model.config), rank, rank), rank, 5.0)
    return folder


def new_model(folder):
    return DecoderModel.from_folder(folder / "model", dtype=DType.float32, num_pages=80, page_size=4)


def new_engine(folder, *names, **options):
    model = new_model(folder)
    poison(model)
    engine = Engine(model, **options)
    for name in names or RANKS:
        engine.load_adapter(name, folder / name)
    return engine


SAMPLED = Sampling(12, temperature=1.0, seed=3, ignore_end=True, logprobs=1)


def texts(engine, turn, prompts=PROMPTS, **options):
    """What each request gives, all of them at once."""
    numbers = [engine.add_request(p, SAMPLED, adapter=name, **options) for p, name in zip(prompts, turn, strict=True)]
    outputs = {number: [] for number in numbers}
    while not engine.is_idle:
        for output in engine.step():
            assert output.error is None
            outputs[output.request].append((output.tokens, output.logprobs))
    return [outputs[number] for number in numbers]


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 7}, {"speculate": "lookup"}, {"num_pages": 40}])
def test_a_request_is_the_same_to_the_bit_in_any_company(folder, options):
    alone = [texts(new_engine(folder), [name], [prompt])[0] for name, prompt in zip(TURN, PROMPTS, strict=True)]
    assert texts(new_engine(folder, **options), TURN) == alone
    assert alone[0] != texts(new_engine(folder), [None], PROMPTS[:1])[0]


def test_prefixes_are_shared_within_an_adapter_alone(folder, tmp_path):
    """After a reload under another name too, and after a restart from the disk."""
    disk = DiskTier(tmp_path, 1 << 30)
    engine = new_engine(folder, disk=disk)

    def cached(name, namespace=None, of=engine):
        (output,) = of.stream(PROMPTS[0], Sampling(1), adapter=name, namespace=namespace)
        return output.cached_tokens

    assert [cached(name) for name in (None, "wide", "narrow")] == [0, 0, 0]
    assert [cached(name) for name in (None, "wide", "narrow")] == [32, 32, 32]
    assert [cached("wide", each) for each in ("a", "a", ("a", 1))] == [0, 32, 0]
    engine.unload_adapter("wide")
    engine.load_adapter("again", folder / "wide")
    assert cached("again") == 32
    engine.flush()
    restarted = new_engine(folder, "narrow", disk=disk)
    assert cached("narrow", of=restarted) == restarted.tokens_restored == 32


def test_a_request_goes_on_when_its_adapter_is_unloaded(folder):
    engine = new_engine(folder)
    expected = texts(new_engine(folder), ["wide"], PROMPTS[:1])[0]
    stream = engine.stream(PROMPTS[0], SAMPLED, adapter="wide")
    outputs = [next(stream)]
    engine.unload_adapter("wide")
    with pytest.raises(ContractError, match="adapter: expected one of narrow, got 'wide'"):
        engine.add_request(PROMPTS[0], adapter="wide")
    engine.load_adapter("other", folder / "narrow")  # takes no place of one that is in use
    outputs += stream
    assert [(each.tokens, each.logprobs) for each in outputs] == expected
    del stream, outputs
    engine.load_adapter("wide", folder / "wide")
    assert [each.name for place in engine.model.adapters._places if (each := place())] == ["wide", "narrow", "other"]
    assert texts(engine, TURN) == texts(new_engine(folder), TURN)


@pytest.mark.slow
def test_quantised_weights_stay_as_they_are(tmp_path):
    """Beside them adapters are bfloat16; the model's own rows have the bits that they have without adapters."""
    file = write_gguf(tmp_path / "model.gguf", make_model("llama"), q4_k_m)
    model = DecoderModel.from_folder(file, dtype=DType.float32, num_pages=36, page_size=16)
    layers = noise(adaptable_layers(model.config), 8, 1)
    before = {name: array.copy() for name, array in model.weights.items()}
    pages = np.arange(36).reshape(4, 9).tolist()
    poison(model)
    plain = model.step(PROMPTS, [0] * 4, pages)
    for name, scale in (("loud", 8.0), ("silent", 1e-30)):
        model.adapters.load(name, write_peft(tmp_path / name, layers, 8, scale))
    adapted = model.step(PROMPTS, [0] * 4, pages, adapters=[0, NO_ADAPTER, 1, 0])
    np.testing.assert_array_equal(adapted[1:3], plain[1:3])
    assert relative_error(adapted[0], plain[0]) > 0.1
    for name, array in before.items():
        np.testing.assert_array_equal(model.weights[name], array)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ContractError, lambda e, _: e.add_request([1], adapter="other"), "adapter: expected one of wide, narrow, got"),
        (ContractError, lambda e, _: e.add_request([1], adapter=7), "adapter: expected one of wide, narrow, got 7"),
        (ContractError, lambda e, f: e.load_adapter("wide", f / "narrow"), "name: expected one that no adapter has"),
        (ContractError, lambda e, f: e.load_adapter("", f / "narrow"), "name: expected one that no adapter has"),
        (ContractTypeError, lambda e, f: e.load_adapter(None, f / "narrow"), "name: expected a text, got None"),
        (ContractError, lambda e, _: e.unload_adapter("other"), "adapter: expected one of wide, narrow, got 'other'"),
    ],
)
def test_what_no_engine_can_do_is_refused(folder, error, call, message):
    engine = new_engine(folder)
    with pytest.raises(error, match=message):
        call(engine, folder)
    assert engine.adapters == ("wide", "narrow")
    assert engine.is_idle
