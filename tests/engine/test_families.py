"""Every family's step against Hugging Face transformers: the same weights, the whole text at once and without pages."""

import pytest
from max.dtype import DType

from paged_kv.engine.model import DecoderModel
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.serve.cache_size import cache_size_of
from support.checkpoints import CONFIG, read_config
from support.families import CASES, PAGES, PROMPTS, assert_logits, engine_texts, make_cases, norm_error
from support.llama_family import Member, load_family
from support.made import Made

# Norms on both sides of the layers; test_llama.py has them in front. 2 ** -8 for each of some ten roundings in a row,
# and of some twenty.
BFLOAT16 = {"gemma3": 0.05, "gpt_oss": 0.08, "qwen3_5": 0.05}
HYBRIDS = ("qwen3_next", "qwen3_5", "granite_hybrid", "lfm2", "nemotron_h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def models(folder):
    def make(name):
        case, _, dtype = name.partition(" in ")
        if not (folder / case).exists():
            make_cases([case], folder)
        return load_family({name: Member(folder / case, DType[dtype or "float32"], *PAGES)})[name]

    return Made(make)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(folder, models, name):
    assert_logits(models[name], folder / name, 1e-4)


@pytest.mark.parametrize("name", BFLOAT16)
def test_in_bfloat16_logits_are_near(folder, models, name):
    assert_logits(models[f"{name} in bfloat16"], folder / name, BFLOAT16[name], norm_error)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3", "gemma4", "gpt_oss", *HYBRIDS])
def test_texts_in_company_are_those_of_each_prompt_alone(models, name):
    """Layers with and without windows, or all with one, whose pages are given back as texts grow, or with states:
    prompts in chunks, with drafts, and more of them than there are pages for.
    """
    alone = [engine_texts(models[name], [prompt], 40)[0] for prompt in PROMPTS]
    assert engine_texts(models[name], PROMPTS, 40, max_step_tokens=24, speculate="lookup", num_pages=12) == alone


def test_what_pages_of_windows_do_not_do_is_refused(models):
    model, sizes = models["gemma3"], {"dtype": DType.float32, "num_pages": 8, "page_size": 16}
    assert model.window_page_bytes > model.page_bytes > 0
    with pytest.raises(ContractError, match="num_window_pages: expected at least"):
        DecoderModel(model.config, {}, **sizes, num_window_pages=1)
    with pytest.raises(
        ContractError, match="num_window_pages: expected at least"
    ):  # its layers have heads of two kinds
        DecoderModel(models["gemma4"].config, {}, **sizes, num_window_pages=0)


@pytest.mark.parametrize(
    ("pages", "memory", "windows"), [(2000, None, 4 * 4 + 128), (40, None, 40), (None, 10_000_000, 4 * 4 + 128)]
)
def test_a_server_divides_its_memory_between_pages(models, pages, memory, windows):
    """Four requests and a step say how many pages of windows there are, and no more than others."""
    config, sizes = models["gemma4"].config, {"page_size": 16, "requests": 4, "free": 10**9}
    size = cache_size_of(config, DType.float32, None, pages=pages, memory=memory, **sizes)
    assert size.num_window_pages == windows
    assert size.bytes == size.num_pages * size.page_bytes + windows * size.window_page_bytes
    assert memory is None or memory - size.page_bytes < size.bytes <= memory


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention: not supported.*, got "all"'),
        (
            {"num_kv_shared_layers": 1, "num_hidden_layers": 2},
            "num_kv_shared_layers: expected a layer of each kind.*, got 1",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 32}}},
            "per_layer_config.0: expected the heads of all layers, as it has a window.*, got .*",
        ),
        (
            {"num_hidden_layers": 12, "per_layer_config": {"5": {"head_dim": 32}}},
            "per_layer_config: expected the same heads in all layers without a window.*, got .*",
        ),
    ],
)
def test_what_gemma4_does_not_compute_is_refused(tmp_path, said, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path, architectures=["Gemma4ForCausalLM"], **said)


def test_a_window_of_mistral_is_there_unless_it_is_null(tmp_path):
    """As transformers has it: the key is missing in the files of the first release."""
    mistral = {"architectures": ["MistralForCausalLM"]}
    layers = CONFIG["num_hidden_layers"]
    assert read_config(tmp_path / "missing", **mistral).windows == (4095,) * layers
    assert read_config(tmp_path / "null", **mistral, sliding_window=None).windows == ()


LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 96}


def test_a_text_of_llama4_ends_with_its_first_chunk(tmp_path):
    """Past it transformers masks what a window does not."""
    said = LLAMA4 | {"max_position_embeddings": 100_000}
    assert read_config(tmp_path / "default", **said).max_position_embeddings == 8192
    assert read_config(tmp_path / "said", **said, attention_chunk_size=64).max_position_embeddings == 64
    everywhere = {"layer_types": ["full_attention"] * CONFIG["num_hidden_layers"]}
    assert read_config(tmp_path / "all", **said, **everywhere).max_position_embeddings == 100_000


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"moe_layers": [2]}, r"moe_layers: expected a list of layers below num_hidden_layers = 2.*, got \[2\]"),
        ({"layer_types": ["chunked_attention"]}, "layer_types: expected a list of num_hidden_layers = 2.*, got .*"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            'layer_types: expected "full_attention" or.*, got "sliding_attention"',
        ),
    ],
)
def test_what_llama4_does_not_compute_is_refused(tmp_path, said, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path, **LLAMA4, **said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok: expected 2.*, got 3"),
        (
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}},
            r"rope_scaling\.long_mscale: expected that of short texts, short_mscale = 1\.2.*, got 1\.3",
        ),
    ],
)
def test_what_phimoe_does_not_compute_is_refused(tmp_path, said, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path, architectures=["PhiMoEForCausalLM"], **said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: not supported.*, got 30.0"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of num_hidden_layers = 2.*, got .*"),
        ({"layer_types": ["full_attention", "mamba"]}, 'layer_types: expected "full_attention" or.*, got "mamba"'),
        ({"hidden_activation": "relu"}, 'hidden_activation: expected "gelu_pytorch_tanh".*, got "relu"'),
    ],
)
def test_what_gemma3_does_not_compute_is_refused(tmp_path, said, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path, architectures=["Gemma3ForCausalLM"], **said)
