"""config.json: what is read, and that whatever would be computed wrongly is refused by name."""

import json

import numpy as np
import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paged_kv.checkpoint.config import load_config, load_sampling
from paged_kv.engine.demo import byte_tokenizer
from paged_kv.engine.sampling import OF_MODEL
from paged_kv.graphs.rope import Linear, Llama3, Rope
from support.checkpoints import CONFIG, read_config, write_config
from support.refusals import refused

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256}


def test_a_sharpening_of_0_is_as_not_said(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 0.7}
    found = read_config(tmp_path, rope_scaling=yarn | {"mscale_all_dim": 0})
    assert found == read_config(tmp_path, rope_scaling=yarn)
    assert found.rope.scaling.attention_factor == pytest.approx(0.1 * np.log(8) + 1)


def test_nothing_said(tmp_path):
    config = read_config(tmp_path)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), None)


def test_everything_said(tmp_path):
    config = read_config(
        tmp_path,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=500000,
        rope_scaling=LLAMA3,
        bos_token_id=256,
        eos_token_id=[257, 258],
        torch_dtype="bfloat16",
        hidden_act="silu",
        attention_bias=False,
    )
    assert (config.head_dim, config.tie_word_embeddings) == (128, True)
    assert config.rope == Rope(128, 500000.0, Llama3(8.0, 1.0, 4.0, 256))
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (256, (257, 258), "bfloat16")


def test_model_type_stands_in_for_architectures(tmp_path):
    assert read_config(tmp_path, drop=("architectures",)).hidden_size == 48


@pytest.mark.parametrize(
    ("said", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 7e3, "rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": {}}, 5e5, Llama3(8.0, 1.0, 4.0, 256)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 1e4, Linear(4.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, 1e4, None),
        ({"rope_scaling": {"type": "dynamic", "alpha": 8.0}}, 1e4 * 8 ** (16 / 14), None),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, Llama3(8.0, 1.0, 4.0, 256)),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, 1e4, Llama3(8.0, 1.0, 4.0, 2048)),
    ],
)
def test_rope_in_the_old_form_and_the_new(tmp_path, said, theta, scaling):
    config = read_config(tmp_path, **said)
    assert config.rope == Rope(16, theta, scaling)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


def test_olmo3_in_the_old_form_and_the_new(tmp_path):
    """As published, and as transformers 5 writes it: windowed layers have no part in the scaling."""
    olmo = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 9, "num_hidden_layers": 5}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    old = read_config(tmp_path / "old", **olmo, rope_theta=5e5, rope_scaling=yarn)
    values = transformers.Olmo3Config(**CONFIG | olmo, rope_theta=5e5, rope_scaling=yarn).to_dict()
    new = read_config(tmp_path / "new", **olmo, rope_parameters=values["rope_parameters"])
    assert old == new
    assert (old.local_rope, old.rope.scaling.factor) == (Rope(16, 5e5), 8.0)
    assert old.windows == (8, 8, 8, -1, 8)
    refused(read_config, tmp_path / "null", **olmo | {"sliding_window": None}, match="sliding_window is missing")


@pytest.mark.parametrize(
    ("generation", "eos"), [({"eos_token_id": [1, 2]}, (1, 2)), ({"eos_token_id": 3}, (3,)), ({}, (9,))]
)
def test_generation_config_says_where_to_stop(tmp_path, generation, eos):
    write_config(tmp_path, eos_token_id=9)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == eos


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 9}])
def test_ends_that_are_known_by_their_texts(tmp_path, generation):
    """No generation_config.json says where to stop; `<eos>` is past the model's vocabulary here."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|end|>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token_id=9, vocab_size=260)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    known = (tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|end|>"))
    assert load_config(tmp_path).eos_token_ids == ((9,) if generation else (9, *known))


REQUIRED = [key for key in CONFIG if key not in ("architectures", "model_type", "num_key_value_heads", "head_dim")]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_field_is_named(tmp_path, key):
    refused(read_config, tmp_path, drop=(key,), match=rf"config\.json: {key} is missing$")


@pytest.mark.parametrize("value", ["8", 8.0, True, 0, -8, [8]])
@pytest.mark.parametrize("key", [k for k in REQUIRED if k != "rms_norm_eps"] + ["num_key_value_heads", "head_dim"])
def test_what_is_no_positive_integer_is_refused(tmp_path, key, value):
    refused(read_config, tmp_path, **{key: value}, match=rf"config\.json: {key}: expected a positive integer, got .*$")


BAD = [
    ({"architectures": ["BertModel"]}, r'architectures: expected one of Llama, Mistral.*, got \["BertModel"\]'),
    ({"architectures": "LlamaForCausalLM"}, r"architectures: expected one of"),
    ({"architectures": None, "model_type": "bert"}, r'model_type: expected one of llama, mistral.*, got "bert"'),
    ({"architectures": None, "model_type": None}, r"model_type: expected .*, got null"),
    ({"hidden_act": "gelu"}, r'hidden_act: .*, got "gelu"'),
    ({"mlp_bias": 1}, r"mlp_bias: expected true or false.*, got 1"),
    ({"tie_word_embeddings": "yes"}, r'tie_word_embeddings: expected true or false.*, got "yes"'),
    ({"quantization_config": {"bits": 4}}, r"quantization_config: quantized"),
    ({"rms_norm_eps": 0}, r"rms_norm_eps: expected a positive number.*, got 0"),
    ({"rms_norm_eps": "1e-5"}, r'rms_norm_eps: expected a positive number.*, got "1e-5"'),
    ({"rope_theta": True}, r"rope_theta: expected a positive number.*, got true"),
    *(({"rope_theta": theta}, "rope_theta: expected a number from 1 to 1e") for theta in (1, 0.5, 1e-30, 2e18)),
    ({"num_attention_heads": 5}, r"num_key_value_heads: expected a divisor of num_attention_heads = 5.*, got 2"),
    ({"head_dim": 12}, r"head_dim: expected a multiple of 8.*, got 12"),
    ({"head_dim": 520}, r"head_dim: .* at most 512.*, got 520"),
    ({"head_dim": None, "hidden_size": 50}, r"hidden_size: expected a multiple of num_attention_heads = 4.*, got 50"),
    ({"head_dim": None, "hidden_size": 48}, r"head_dim: expected a multiple of 8.*, got 12"),
    ({"rope_scaling": "linear"}, r'rope_scaling: expected an object.*, got "linear"'),
    ({"rope_scaling": {"type": "ntk", "factor": 2}}, r'rope_scaling\.type: expected .*, got "ntk"'),
    ({"rope_parameters": {"rope_type": "su", "factor": 2}}, r'rope_parameters\.rope_type: expected .*, got "su"'),
    ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling\.factor: expected a positive number.*, got -2"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, r"rope_scaling\.low_freq_factor is missing"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, r"rope_scaling\.high_freq_factor: expected more than .*1"),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1.5}},
     r"rope_scaling\.original_max_position_embeddings: expected a positive integer.*, got 1\.5"),
    ({"rope_parameters": {"full_attention": LLAMA3 | {"rope_theta": 5e5}}},
     r"rope_parameters\.full_attention: all layers of this family"),
    # What transformers would lose.
    ({"rope_parameters": PLAIN, "rope_scaling": YARN},
     r"rope_parameters\.rope_theta: rope_scaling replaces rope_parameters, so rope_theta.*, got 1000000\.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": YARN},
     r"rope_parameters\.partial_rotary_factor: rope_scaling replaces rope_parameters.*, got 0\.5"),
    ({"architectures": ["Gemma4ForCausalLM"], "rope_scaling": YARN}, "rope_scaling: each type of layer.*, got .*"),
    ({"architectures": ["Olmo3ForCausalLM"], "sliding_window": 9, "rope_parameters": PLAIN},
     "rope_parameters: expected full_attention too.*, got .*"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1: LlamaFor.*, got 0\.5"),
    ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor: expected an even part of head_dim = 16.*, got 1\.5"),
    ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor: expected an even part.*, got 0\.2"),
    ({"eos_token_id": 259}, r"eos_token_id: expected token ids from 0 to vocab_size - 1 = 258.*, got 259"),
    ({"eos_token_id": [1, "2"]}, r'eos_token_id: expected token ids.*, got \[1, "2"\]'),
    ({"bos_token_id": -1}, r"bos_token_id: expected token ids.*, got -1"),
    ({"torch_dtype": "int8"}, r'torch_dtype: expected .*, got "int8"'),
    ({"dtype": "float64"}, r'dtype: expected .*, got "float64"'),
    ({"dtype": ["float32"]}, r'dtype: expected .*, got \["float32"\]'),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_what_is_not_supported_is_refused(tmp_path, bad, message):
    refused(read_config, tmp_path, **bad, match=r"config\.json: " + message)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(load_config, tmp_path, match=r"config\.json: ")


def test_a_bad_generation_config_is_named(tmp_path):
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refused(load_config, tmp_path, match=r'generation_config\.json: eos_token_id: expected token ids.*, got "</s>"')


CHOSEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "typical_p": 0.9, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        (CHOSEN | {"do_sample": True, "eos_token_id": 2, "max_length": 9}, CHOSEN),
        ({"top_k": 0, "temperature": None}, {"top_k": 0}),
        ({"temperature": 0}, {"temperature": 0}),
        (CHOSEN | {"do_sample": False}, {"repetition_penalty": 1.05}),
        ({}, {}),
        (None, {}),
    ],
)
def test_generation_config_says_how_tokens_are_chosen(tmp_path, generation, found):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_sampling(tmp_path, OF_MODEL) == found


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ('{"temperature": -1}', "temperature: expected a number from 0 on.*, got -1"),
        ('{"temperature": "hot"}', 'temperature: expected a number.*, got "hot"'),
        ('{"temperature": NaN}', "temperature: expected a number.*, got NaN"),
        ('{"top_p": 0}', "top_p: expected a positive number.*, got 0"),
        ('{"top_p": 1.5}', "top_p: expected a number from .* to 1.*, got 1.5"),
        ('{"min_p": 2}', "min_p: expected a number from 0 to 1.*, got 2"),
        ('{"top_k": 2.5}', "top_k: expected an integer from -1 on.*, got 2.5"),
        ('{"top_k": true}', "top_k: expected an integer.*, got true"),
        ('{"repetition_penalty": 0}', "repetition_penalty: expected a positive number.*, got 0"),
        ('{"do_sample": "yes"}', 'do_sample: expected true or false.*, got "yes"'),
        ("[]", "expected a JSON object"),
    ],
)
def test_bad_sampling_of_a_generation_config_is_named(tmp_path, generation, message):
    (tmp_path / "generation_config.json").write_text(generation)
    refused(load_sampling, tmp_path, OF_MODEL, match=rf"generation_config\.json: {message}")


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 512])
@pytest.mark.parametrize("theta", [1e4, 5e5, 12345.678])
@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3, LLAMA3 | {"factor": 32.0, "low_freq_factor": 1.3}]
)
def test_inverse_frequencies_are_those_of_transformers(tmp_path, head_dim, theta, scaling):
    config = read_config(tmp_path, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(tmp_path)).inv_freq.numpy()
    ours = config.rope.inverse_frequencies()
    assert ours.dtype == np.float32
    # Bit-equal but for the few powers that torch itself rounds the other way; llama3's blend may amplify those.
    assert np.mean(ours == theirs) > 0.98
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
