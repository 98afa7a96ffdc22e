"""Checkpoints that lie about sizes and numbers: a `CheckpointError` of one line, before memory is taken for them."""

import json
import math
import os
import struct
import tracemalloc

import gguf
import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf import GgufCheckpoint, open_gguf
from paged_kv.checkpoint.gguf_header import read_header
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.graphs import models
from paged_kv.graphs.models.fields import MAX_LAYERS, MAX_SIZE
from support.checkpoints import raw_safetensors, rewrite, write_config
from support.refusals import refused

FAMILIES = [name for name, family in models.FAMILIES.items() if not family.engine_only]
HUGE = [10**5, 10**9, 2**31, 2**62 + 1, 2**63, 2**64, 10**400]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
MEMORY = 16 << 20
"""Bytes that a refusal may take at most."""


@pytest.fixture(autouse=True)
def memory():
    """No refusal takes much memory; what Python takes for a size of 10^5 would already be more."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY


def overrides(family):
    """The keys that `write_config` needs for a family: a window, and types where a family wants them said."""
    windowed = {"sliding_window": 8, "use_sliding_window": True, "hidden_activation": "gelu_pytorch_tanh"}
    return {"architectures": [family], **windowed}


@pytest.mark.parametrize("layers", HUGE, ids=lambda size: f"{size:.1e}" if size < 1e300 else "10^400")
@pytest.mark.parametrize("family", FAMILIES)
def test_too_many_layers_are_refused_by_every_family(tmp_path, family, layers):
    write_config(tmp_path, **overrides(family), num_hidden_layers=layers)
    refused(
        load_config,
        tmp_path,
        match=rf"config\.json: num_hidden_layers: expected at most {MAX_LAYERS}, got 10*.*|num_hidden",
    )


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(tmp_path):
    """In a folder and in a GGUF file; the limit of all models alone would let this pass."""
    write_config(tmp_path, num_hidden_layers=MAX_LAYERS)
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors({"a": ("F32", (1,), b"abcd")}))
    refused(open_source, tmp_path, match=f"{MAX_LAYERS} layers, but only 1 tensors")
    metadata = gguf_model() | {"llama.block_count": (4, struct.pack("<I", MAX_LAYERS))}
    file = raw_gguf(tmp_path / "a.gguf", metadata, [("token_embd.weight", (16, 8), 0)])
    refused(lambda: open_gguf(file).config, match=f"{MAX_LAYERS} layers, but only 1 tensors")


@pytest.mark.parametrize("size", HUGE[2:], ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("key", SIZES)
def test_sizes_past_32_bits_are_refused(tmp_path, key, size):
    write_config(tmp_path, **{key: size})
    refused(load_config, tmp_path, match=rf"config\.json: {key}: expected at most {MAX_SIZE}.*, got \d+.*")


@pytest.mark.parametrize(
    "number",
    [1e308, 3.5e38, 1e-320, 1e-39, -1e-30, float("nan"), float("inf"), 10**400],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_numbers_that_float32_does_not_hold_are_refused(tmp_path, key, number):
    write_config(tmp_path, **{key: number})
    refused(
        load_config,
        tmp_path,
        match=rf"config\.json: {key}: expected a (positive number|number from \S+ to \S+).*, got .*",
    )


SCALINGS = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.0},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "value", [0, 1, 1e-38, 1e38, 1e308, 10**400, float("nan"), [], "x", [1e308] * 8, [10**400] * 8]
)
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in SCALINGS.items() for key in keys])
def test_a_rotary_scaling_gives_finite_frequencies_or_is_refused(tmp_path, kind, key, value):
    scaling = {"rope_type": kind, "original_max_position_embeddings": 64} | SCALINGS[kind] | {key: value}
    write_config(tmp_path, rope_scaling=scaling)
    try:
        rope = load_config(tmp_path).rope
    except CheckpointError:
        refused(load_config, tmp_path)
    else:
        frequencies = rope.inverse_frequencies()
        assert 0 < frequencies.min() <= frequencies.max() * 2**31 < 3e38


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
def test_an_original_context_of_one_token_is_refused(tmp_path, kind, context):
    """Its logarithm is 0, by which frequencies would be divided."""
    scaling = {"rope_type": kind, "original_max_position_embeddings": context} | SCALINGS[kind]
    scaling.pop("attention_factor", None)
    write_config(tmp_path, rope_scaling=scaling)
    if context == 1:
        refused(load_config, tmp_path, match=r"original_max_position_embeddings: expected at least 2.*, got 1")
    else:
        load_config(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """Sparse files: their size costs nothing on disk, and would in memory."""
    write_demo_checkpoint(tmp_path / "model")
    for name, words in (
        ("tokenizer.json", "not a tokenizer: .* bytes"),
        ("config.json", "[0-9]+ bytes, expected 67108864 at most"),
    ):
        file = tmp_path / "model" / name
        os.truncate(file, 4 << 40)
        refused(load_config if name == "config.json" else tokenizer, tmp_path / "model", match=words)


def tokenizer(folder):
    from paged_kv.engine.tokenizer import Tokenizer

    return Tokenizer(folder, load_config(folder))


def gguf_string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_model(kind="llama"):
    """The metadata of a small model: {key: (type, bytes)}."""
    sizes = {"embedding_length": 16, "feed_forward_length": 16, "block_count": 1, "context_length": 64}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 8}
    numbers = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
    return (
        {"general.architecture": (8, gguf_string(kind))}
        | {f"{kind}.{key}": (4, struct.pack("<I", value)) for key, value in sizes.items()}
        | {f"{kind}.{key}": (6, struct.pack("<f", value)) for key, value in numbers.items()}
    )


def data_bytes(dims, encoding):
    elements, size = gguf.GGML_QUANT_SIZES[encoding]
    return math.prod(dims) // elements * size


def raw_gguf(file, metadata, tensors=(), *, counts=None, data=4096):
    """A file of these entries; tensors are (name, dimensions with the fastest first, number of the encoding)."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, *(counts or (len(tensors), len(metadata))))]
    for key, (kind, value) in metadata.items():
        parts += [gguf_string(key), struct.pack("<I", kind), value]
    offset = 0
    for name, dims, encoding in tensors:
        info = struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", encoding, offset % 2**64)
        parts += [gguf_string(name), info]
        offset += -(-data_bytes(dims, encoding) // 32) * 32
    file.write_bytes(b"".join(parts) + bytes(data))
    return file


def config_of_gguf(file):
    return open_gguf(file).config


@pytest.mark.parametrize("counts", [(2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1), (1, 1)])
def test_counts_past_the_end_of_a_gguf_file(tmp_path, counts):
    file = raw_gguf(tmp_path / "a.gguf", {}, counts=counts, data=0)
    refused(open_gguf, file, match="cut short")


@pytest.mark.parametrize("length", [2**20, 2**31, 2**63, 2**64 - 1])
def test_strings_and_arrays_past_the_end_of_a_gguf_file(tmp_path, length):
    length = struct.pack("<Q", length)
    values = {"string": (8, length + b"abc"), "numbers": (9, struct.pack("<I", 10) + length)}
    values |= {"strings": (9, struct.pack("<I", 8) + length), "bools": (9, struct.pack("<I", 7) + length)}
    for name, value in values.items():
        file = raw_gguf(tmp_path / f"{name}.gguf", {name: value}, data=64)
        refused(open_gguf, file, match="cut short")
    file = tmp_path / "key.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + length + bytes(64))
    refused(open_gguf, file, match="a name of|cut short")


@pytest.mark.parametrize(
    "dims", [(0,), (2**63, 0), (0, 2**64 - 1), (2**62, 2**62), (2**64 - 1,), (2**32, 2**32, 2**32)]
)
def test_shapes_past_the_end_of_a_gguf_file(tmp_path, dims):
    file = raw_gguf(tmp_path / "a.gguf", gguf_model(), [("token_embd.weight", dims, 0)])
    refused(open_gguf, file, match="cut short|it is empty")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("a", (4,), 0)] * 2, "tensor a is there twice"),
        ([("a", (), 0)], "tensor a: expected 1 to 4 dimensions, got 0"),
        ([("a", (1,) * 5, 0)], "tensor a: expected 1 to 4 dimensions, got 5"),
        ([("a", (100,), 12)], "expected rows of whole Q4_K blocks of 256, got"),
        ([("a", (48, 2), 39)], "expected rows of whole MXFP4 blocks of 32, got"),
        ([("a", (64, 8192, 8), 39)], "cut short"),
    ],
    ids=["a name twice", "rank 0", "rank 5", "half a block", "half a block of MXFP4", "more experts than bytes"],
)
def test_tensors_that_a_gguf_file_cannot_have(tmp_path, tensors, words):
    refused(open_gguf, raw_gguf(tmp_path / "a.gguf", gguf_model(), tensors), match=words)


def test_a_key_that_a_gguf_file_has_twice(tmp_path):
    """The last of two values would be taken without a word."""
    metadata = gguf_model()
    file = raw_gguf(tmp_path / "a.gguf", metadata | {"llama.block_coumt": metadata["llama.block_count"]})
    file.write_bytes(file.read_bytes().replace(b"llama.block_coumt", b"llama.block_count"))
    refused(open_gguf, file, match=r"a\.gguf: the key llama\.block_count of the metadata is there twice")


@pytest.mark.parametrize("version", [1, 4, 3 << 24], ids=["older", "newer", "big-endian"])
def test_another_version_of_gguf_is_refused(tmp_path, version):
    file = raw_gguf(tmp_path / "a.gguf", gguf_model())
    file.write_bytes(b"GGUF" + struct.pack("<I", version) + file.read_bytes()[8:])
    refused(open_gguf, file, match=f"GGUF version {version}; only little-endian")


def gguf_values():
    """Values of every kind, of which at most one fits any key."""
    yield from ((10, struct.pack("<Q", number)) for number in (0, 10**5, 10**9, 2**31, 2**62 + 1, 2**64 - 1))
    yield from ((12, struct.pack("<d", number)) for number in (float("nan"), float("inf"), -1.0, 0.0, 1e308, 1e-320))
    yield 11, struct.pack("<q", -1)
    yield 7, b"\x01"
    yield 8, gguf_string("a\nb")
    yield 9, struct.pack("<IQ", 8, 2) + gguf_string("a") + gguf_string("b")
    yield 9, struct.pack("<IQ", 5, 0)
    yield 9, struct.pack("<IQii", 5, 2, 1, 2)
    yield 9, struct.pack("<IQff", 6, 2, float("nan"), float("nan"))


KEYS = [*gguf_model(), *(f"llama.{key}" for key in ("expert_count", "attention.value_length", "rope.scaling.type"))]
KEYS += ["llama.rope.dimension_count", "llama.attention.sliding_window", "general.alignment", "split.count"]
KEYS += [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot")]


SIZES_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
OF_EXPERTS = [*SIZES_OF_EXPERTS, "expert_weights_norm", "block_count"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "key", "rope"),
    [
        *(("llama", key, rope) for key in KEYS for rope in (False, True)),
        *((kind, f"{kind}.{key}", False) for kind in ("qwen3moe", "gpt-oss") for key in OF_EXPERTS),
    ],
)
def test_hostile_metadata_of_a_gguf_file_is_refused(tmp_path, kind, key, rope):
    """Try every value of each key: most are refused when the configuration is read, others for missing weights."""
    model, tensors = gguf_model(kind), [("token_embd.weight", (16, 32), 0)] + [("rope_freqs.weight", (4,), 0)] * rope
    if kind != "llama":
        model |= {f"{kind}.{name}": (4, struct.pack("<I", size)) for name, size in SIZES_OF_EXPERTS.items()}
    for number, value in enumerate(gguf_values()):
        refused(config_of_gguf, raw_gguf(tmp_path / f"{number}.gguf", model | {key: value}, tensors))


def test_an_error_of_any_type_becomes_one_that_names_the_file(tmp_path):
    """With the error itself as its cause; what ends a program, and a lack of memory, go through."""
    refused(
        open_source, write_config(tmp_path / "nested", architectures=[["x"]]), match=r"json: architectures: expected"
    )
    write_config(tmp_path)
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"abcd")
    refused(open_source, tmp_path, match=r"model\.safetensors: not a safetensors file")
    for error in (KeyError("x"), ZeroDivisionError("x"), RecursionError("x"), OverflowError("x")):
        with pytest.raises(CheckpointError, match=f"model: {type(error).__name__}: ") as caught, file_errors("model"):
            raise error
        assert caught.value.__cause__ is error
    for kind in (KeyboardInterrupt, SystemExit, MemoryError, ContractError):
        with pytest.raises(kind), file_errors("model"):
            raise kind


@pytest.mark.parametrize(
    "templates",
    [[{"name": ["x"], "template": "a"}], [{"name": "default"}], [{"name": "default", "template": 5}], ["a"], 5],
)
def test_chat_templates_of_odd_names_and_types_are_refused(tmp_path, templates):
    write_demo_checkpoint(tmp_path / "model")
    rewrite(tmp_path / "model" / "tokenizer_config.json", chat_template=templates)
    refused(chat_of, tmp_path / "model", match=r"tokenizer_config\.json: chat_template: expected a text, or a list")


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "9" * 5000 + " }}",
        "{% for a in [] %}" * 25 + "{% endfor %}" * 25,
        "{% break %}",
        "{{ 1" + "+1" * 5000 + " }}",
    ],
    ids=["a number of 5,000 digits", "25 loops in each other", "a break outside of loops", "a sum of 5,000"],
)
def test_chat_templates_that_cannot_be_compiled_are_refused(tmp_path, template):
    write_demo_checkpoint(tmp_path / "model")
    rewrite(tmp_path / "model" / "tokenizer_config.json", chat_template=template)
    refused(chat_of, tmp_path / "model", match="model: the chat template cannot be read")


def chat_of(folder):
    from paged_kv.serve.chat import ChatFormat

    return ChatFormat.read(open_source(folder), tokenizer(folder))


def test_a_special_token_of_a_gguf_file_that_is_no_number(tmp_path):
    """With the model's own tokenizer.json beside it, nothing else reads it."""
    from paged_kv.serve.chat.template_files import read_names

    tokens = (9, struct.pack("<IQ", 8, 1) + gguf_string("a"))
    for number, value in enumerate(
        [(8, gguf_string("x")), (9, struct.pack("<IQii", 5, 2, 1, 2)), (7, b"\x01"), (6, b"abcd")]
    ):
        metadata = gguf_model() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.bos_token_id": value}
        header = read_header(raw_gguf(tmp_path / f"{number}.gguf", metadata))
        source = Source(tmp_path, None, GgufCheckpoint(header))
        refused(read_names, source, match="tokenizer.ggml.bos_token_id: expected a token id, got ")


def test_names_with_control_characters_do_not_reach_a_terminal(tmp_path):
    name = "token\n\x1b[31membd\0"
    refused(open_gguf, raw_gguf(tmp_path / "a.gguf", gguf_model(), [(name, (0,), 0)]), match=r"token\\n\\x1b")
