"""GGUF files: header, configuration and weights, against transformers' reading of the same files; and every refusal."""

import contextlib
import dataclasses
import re

import gguf
import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from paged_kv.checkpoint import nvfp4
from paged_kv.checkpoint.config import config_of
from paged_kv.checkpoint.gguf import open_gguf
from paged_kv.checkpoint.gguf_header import _ENCODINGS, read_header
from paged_kv.checkpoint.source import open_source
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.encodings import GGUF_ENCODINGS, TABLE, block_bytes, row_bytes
from paged_kv.graphs.models.tensors import expected_tensors
from paged_kv.graphs.quantised import QuantisedWeight, quantised_linear, quantised_rows
from support import gguf_blocks
from support.gguf_blocks import SCALES, dequantise
from support.gguf_files import MODELS, finish, hugging_face_weights, make_model, write_gguf
from support.refusals import refused

MIXED = {
    "attn_qkv": "F32",
    "attn_gate": "F32",
    "token_embd": "Q6_K",
    "output": "Q6_K",
    "attn_v": "F16",
    "ffn_down": "Q4_0",
    "attn_output": "BF16",
    "attn_k_b": "Q8_0",
}


def mixed(name):
    """Every encoding in one file."""
    return next((kind for part, kind in MIXED.items() if f".{part}." in f".{name}"), "Q4_K")


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A file, and the model of transformers that it was made of."""
    model = make_model(request.param)
    return write_gguf(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf", model, mixed), model


def dequantised(blocks, encoding):
    """Return the blocks of a matrix or of a stack of them."""
    rows = dequantise(blocks.reshape(-1, blocks.shape[-1]), encoding)
    return rows.reshape(*blocks.shape[:-1], -1)


def floats(checkpoint):
    """Every weight as float32 in Hugging Face's terms."""
    config = checkpoint.config
    encodings = dict(config.encodings)
    arrays = checkpoint.load(config, DType.float32)
    assert list(arrays) == list(expected_tensors(config))
    return {name: dequantised(array, encodings[name]) if name in encodings else array for name, array in arrays.items()}


def test_weights(pair):
    """Those of the model, rounded as the file's encodings do: exactly, but for norms that the converter adds 1 to."""
    file, model = pair
    expected = {name.replace("sinks.weight", "sinks"): w for name, w in hugging_face_weights(model).items()}
    checkpoint = open_gguf(file)
    assert dict(checkpoint.config.encodings)["model.embed_tokens.weight"] == "Q6_K"
    assert checkpoint.config.float32_activations
    for name, value in floats(checkpoint).items():
        tolerance = 1e-7 if "norm" in name or "A_log" in name else 0
        np.testing.assert_allclose(value, expected[name].detach().numpy(), rtol=0, atol=tolerance, err_msg=name)


def write(file, *, drop=(), architecture="llama", encoding_of=lambda _: "Q4_0", **more):
    return write_gguf(file, make_model(architecture), encoding_of, drop=drop, **more)


@pytest.mark.parametrize("kinds", ["F32", "BF16", "F16"])
def test_a_file_without_quantised_weights(tmp_path, kinds):
    """An ordinary checkpoint, of the dtype that it has."""
    checkpoint = open_gguf(write(tmp_path / "model.gguf", encoding_of=lambda _: kinds))
    assert checkpoint.config.encodings == ()
    assert checkpoint.config.dtype == {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[kinds]
    arrays = checkpoint.load(checkpoint.config, DType.bfloat16)
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}


def test_weights_are_views_of_the_file(tmp_path):
    """The arrays are of the file's map, but for q and k, whose rows change places."""
    checkpoint = open_gguf(write(tmp_path / "model.gguf"))
    arrays = checkpoint.load(checkpoint.config, DType.float32)
    shared = {
        name
        for name, array in arrays.items()
        if any(np.shares_memory(array, tensor.data) for tensor in checkpoint.header.tensors.values())
    }
    assert arrays.keys() - shared == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(2) for name in "qk"
    }


@pytest.mark.parametrize("encoding", GGUF_ENCODINGS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(tmp_path, encoding, scale):
    """Each of a block's: refused by the tensor's name, before a product turns whole rows into NaN."""
    checkpoint = open_gguf(write(tmp_path / "model.gguf", encoding_of=lambda _: encoding))
    data = checkpoint.header.tensors["blk.1.ffn_up.weight"].data
    blocks = data.reshape(-1, TABLE[encoding].gguf_bytes or block_bytes(encoding))  # of the private map, can be written
    checkpoint.load(checkpoint.config, DType.float32)
    if encoding == "NVFP4":
        blocks[-1, 3] = 0xFF  # of E4M3
        refused(checkpoint.load, checkpoint.config, DType.float32, match="blk.1.ffn_up.weight: a scale is not finite")
        return
    if encoding == "MXFP4":  # the one power that is none
        scale = np.nan
    for at in SCALES.get(encoding) or {0: 0}:
        right = blocks[-1].copy()
        if encoding == "IQ1_M":
            gguf_blocks.set_quarters(blocks[-1:], [scale])
        else:
            blocks[-1, at : at + 2] = 255 if encoding == "MXFP4" else np.array([scale], np.float16).view(np.uint8)
        problem = rf"tensor blk\.1\.ffn_up\.weight: row {len(data) - 1}: expected a finite scale, got {scale}"
        refused(checkpoint.load, checkpoint.config, DType.float32, match=problem)
        blocks[-1] = right


def test_numbers_beside_blocks_of_nvfp4(tmp_path):
    """That of a matrix, 1 where there is none, multiplies its weights; what scales x changes nothing."""
    number = {"blk.0.ffn_up.scale": [0.25], "blk.0.ffn_up.input_scale": [3.0]}
    file = write(tmp_path / "model.gguf", encoding_of=lambda _: "NVFP4", more_tensors=number)
    checkpoint = open_gguf(file)
    loaded = checkpoint.load(checkpoint.config, DType.float32)
    for layer, factor in (0, 0.25), (1, 1):
        stored = checkpoint.header.tensors[f"blk.{layer}.ffn_up.weight"].data
        expected = factor * gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.NVFP4)
        blocks = loaded[f"model.layers.{layer}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(dequantise(blocks, "NVFP4"), expected)
    for wrong in ([1.0, 2.0], [np.inf], [1e38]):
        file = write(tmp_path / "wrong.gguf", encoding_of=lambda _: "NVFP4", more_tensors={"blk.0.ffn_up.scale": wrong})
        checkpoint = open_gguf(file)
        refused(
            checkpoint.load,
            checkpoint.config,
            DType.float32,
            match=r"blk\.0\.ffn_up\.(scale: expected one F32|weight: a scale)",
        )


def test_numbers_of_experts_in_nvfp4():
    """One for each: of their matrices, not of the rows."""
    blocks = np.zeros((3, 5, 72), np.uint8)
    numbers = np.arange(1, 4, dtype=np.float32)
    stored = nvfp4.with_number(blocks, numbers).reshape(3, 5, 2, 40)[..., :4].copy().view(np.float32)
    np.testing.assert_array_equal(stored[..., 0], np.broadcast_to(numbers[:, None, None], (3, 5, 2)))


@pytest.mark.parametrize("kind", ["glm4moe", "deepseek2"])
def test_layers_that_draft_are_not_read(tmp_path, kind):
    """GLM's last ones, beside the model; a tensor past them is none of theirs."""
    model, said = make_model(kind), {f"{kind}.block_count": 3, f"{kind}.nextn_predict_layers": 1}
    for layer in (2, 3):
        more = {f"blk.{layer}.nextn.eh_proj.weight": [[1.0]]}
        file = write_gguf(tmp_path / f"{layer}.gguf", model, lambda _: "F32", metadata=said, more_tensors=more)
        checkpoint = open_gguf(file)
        assert (checkpoint.config.num_hidden_layers, checkpoint.config.draft_layers) == (2, 1)
        if layer == 2:
            checkpoint.load(checkpoint.config, DType.float32)
        else:
            problem = r"tensor blk\.3\.nextn\.eh_proj\.weight is no part"
            refused(checkpoint.load, checkpoint.config, DType.float32, match=problem)


@pytest.mark.parametrize("encoding", ["F16", "Q6_K"])
def test_keys_and_values_of_latents_in_one_tensor(tmp_path, encoding):
    """The layout of older files, whose keys are dequantised: blocks lie along the rows that become columns."""
    model, said = make_model("deepseek2"), {"deepseek2.attention.value_length": 40}
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", model, lambda _: encoding, unsplit=True))
    loaded = checkpoint.load(checkpoint.config, DType.float32, dequantise=dequantise)
    for name, expected in hugging_face_weights(model).items():
        if name.endswith("_up_proj.weight") and "self_attn" in name:
            is_blocks = loaded[name].dtype == np.uint8
            assert is_blocks == (encoding == "Q6_K" and "v_up_proj" in name)
            found = dequantised(loaded[name], encoding) if is_blocks else loaded[name]
            np.testing.assert_array_equal(found, expected.detach().numpy(), err_msg=name)
    if encoding == "Q6_K":
        with pytest.raises(ContractError, match=r"dequantise: required for tensor blk\.0\.attn_k_b\.weight in Q6_K"):
            checkpoint.load(checkpoint.config, DType.float32)
    file = write_gguf(tmp_path / "b.gguf", model, lambda _: encoding, unsplit=True, metadata=said)
    refused(open_gguf, file, match=r"attn_kv_b.weight: expected shape \[576, 256\], got \[512, 256\]$")


def test_llama3_scaling(tmp_path):
    """A file has its divisors instead of its parameters."""
    sizes = {"rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = sizes | {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    model = make_model("llama", rope_parameters=scaling)
    expected = config_of(model.config.to_dict(), "config.json")
    plain = dataclasses.replace(expected.rope, scaling=None)
    divisors = plain.inverse_frequencies() / expected.rope.inverse_frequencies()
    file = write_gguf(tmp_path / "a.gguf", model, lambda _: "Q4_0", more_tensors={"rope_freqs.weight": divisors})
    assert open_gguf(file).config.rope == expected.rope
    file = write_gguf(tmp_path / "b.gguf", model, lambda _: "Q4_0", more_tensors={"rope_freqs.weight": divisors + 0.1})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        _ = open_gguf(file).config


def test_long_rope(tmp_path):
    short, long = [1.0 + 0.01 * i for i in range(16)], [2.0 + 0.1 * i for i in range(16)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 10000.0}
    model = make_model("phi3", rope_parameters=scaling, original_max_position_embeddings=512)
    expected = config_of(model.config.to_dict(), "config.json").rope
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    context = {"phi3.rope.scaling.original_context_length": 512, "phi3.rope.scaling.attn_factor": expected.amplitude}
    file = write_gguf(tmp_path / "a.gguf", model, lambda _: "Q4_0", more_tensors=tensors, metadata=context)
    found = open_gguf(file).config.rope
    assert found.scaling.short_factor == pytest.approx(short)
    np.testing.assert_array_equal(found.inverse_frequencies(), expected.inverse_frequencies())
    np.testing.assert_array_equal(found.past()[1], expected.past()[1])
    assert (found.past()[0], found.amplitude) == (expected.past()[0], pytest.approx(expected.amplitude))


def test_tensors_lie_at_the_alignment_that_the_file_names(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(4096)
    for name, count in (("a", 3), ("b", 5)):
        writer.add_tensor(name, np.arange(count, dtype=np.float32))
    finish(writer)
    tensors = read_header(tmp_path / "a.gguf").tensors
    assert {name: tensor.data.view(np.float32).tolist() for name, tensor in tensors.items()} == {
        "a": [0, 1, 2],
        "b": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType)
def test_every_encoding_has_its_name_and_size(tmp_path, kind):
    """The next tensor begins where it ends."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if kind.name == "Q8_1":
        size = 36  # ggml's; 40 in the package
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name in "ab":
        writer.add_tensor_info(name, (3, elements * 32), np.dtype(np.float32), 3 * 32 * size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with (tmp_path / "a.gguf").open("ab") as file:
        file.write(bytes(2 * 3 * 32 * size + 32))
    tensors = read_header(tmp_path / "a.gguf").tensors
    found = {name: (tensor.encoding, tensor.data.shape) for name, tensor in tensors.items()}
    assert found == dict.fromkeys("ab", (kind.name, (3, 32 * size)))


def test_no_encoding_up_to_the_last_is_a_number():
    """Those too that ggml gave up, and Q2_0, which the package does not have yet."""
    assert sorted(_ENCODINGS) == [*range(max(gguf.GGMLQuantizationType) + 1), 42]
    assert _ENCODINGS[42] == ("Q2_0", 64, 18)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"drop": ["context_length"]}, "max_position_embeddings is missing"),
        ({"drop": ["block_count"]}, "llama.block_count: expected a positive integer below 2^31, got None"),
        ({"drop": ["attention.head_count"]}, "llama.attention.head_count: expected a positive integer below 2^31"),
        ({"drop": ["token_embd.weight"]}, "tensor token_embd.weight is missing"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "tensor blk.1.ffn_up.weight is missing"),
        ({"encoding_of": lambda name: "Q8_K" if "blk.0.ffn_up" in name else "Q4_0"},
         "tensor blk.0.ffn_up.weight: expected encoding F32, F16, BF16, Q4_0, Q8_0, IQ4_NL, Q4_K,"
         " Q5_K, Q6_K, IQ4_XS, MXFP4, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S,"
         " IQ3_XXS, IQ3_S, NVFP4, Q1_0, got Q8_K: download the model's Q4_K_M, Q8_0 or Q2_K file"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_used_count: expected a positive integer below 2^31"),
        ({"metadata": {"split.count": 3}}, "name: expected NAME-00001-of-00003.gguf for a part of split.count = 3"),
        ({"metadata": {"llama.rope.dimension_count": 16}},
         "llama.rope.dimension_count: expected head_dim = 32 for llama, got 16"),
        ({"drop": ["attention.value_length"], "metadata": {"llama.attention.value_length": 16}},
         "llama.attention.value_length: expected attention.key_length = 32, got 16"),
        ({"more_tensors": {"blk.0.attn_sinks.weight": [1.0] * 8}}, "tensor blk.0.attn_sinks.weight is no part"),
    ],
)  # fmt: skip
def test_what_is_not_run_is_refused(tmp_path, written, message):
    file = write(tmp_path / "model.gguf", **written)
    with pytest.raises(CheckpointError, match=f"model.gguf: .*{re.escape(message)}"):
        open_source(file).load(DType.float32)


def test_a_wrong_shape_is_refused(tmp_path):
    checkpoint = open_gguf(write(tmp_path / "model.gguf"))
    larger = dataclasses.replace(checkpoint.config, intermediate_size=1024)
    message = r"blk.0.ffn_down.weight: expected shape \[256, 1024\], got \[256, 512\]"
    refused(checkpoint.load, larger, DType.float32, match=message)


@pytest.mark.parametrize("encoding", GGUF_ENCODINGS)
def test_damaged_files_are_refused(tmp_path, encoding):
    """Cut anywhere, or with any byte of the header changed: an error of this package, or a file that is read."""
    whole = write(tmp_path / "model.gguf", encoding_of=lambda _: encoding).read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 4, 10, 23, 24, 100, 700, 2000, len(whole) // 2, len(whole) - 32):
        bad.write_bytes(whole[:size])
        refused(open_gguf, bad, match=r"bad\.gguf: ")
    random = np.random.default_rng(0)
    for at in random.integers(0, 2500, 50):
        bad.write_bytes(whole[:at] + bytes([random.integers(256)]) + whole[at + 1 :])
        with contextlib.suppress(CheckpointError):
            open_source(bad).load(DType.float32)


@pytest.mark.parametrize("encoding", GGUF_ENCODINGS)
def test_a_tensor_of_another_encoding_than_it_says(tmp_path, encoding):
    """It shares bytes with the next one, or leaves some out. Only encodings of as many bytes cannot be told apart."""
    whole = write(tmp_path / "model.gguf", encoding_of=lambda _: encoding).read_bytes()
    at = whole.index(name := b"blk.1.ffn_up.weight") + len(name) + 4 + 2 * 8
    assert whole[at] == gguf_blocks.KINDS[encoding]
    for number in gguf_blocks.KINDS.values():
        kinds = (number, gguf_blocks.KINDS[encoding])
        sizes = {size / elements for elements, size in map(gguf.GGML_QUANT_SIZES.__getitem__, kinds)}
        (bad := tmp_path / "bad.gguf").write_bytes(whole[:at] + bytes([number]) + whole[at + 1 :])
        if len(sizes) == 1:
            open_gguf(bad)
            continue
        refused(open_gguf, bad, match=r"bad\.gguf: (tensor \S+: expected offset \d+|cut short)")


def test_quantised_values_of_a_graph():
    """A file that the graph builder refuses."""
    cpu = DeviceRef.CPU()
    with pytest.raises(ShapeError, match=r"elements: expected a multiple of 256.*got 100"):
        row_bytes("Q4_K", 100)
    types = [TensorType(DType.uint8, shape, cpu) for shape in ([4, 18], [4, 19], ["N", "bytes"])]
    types += [TensorType(DType.int32, ["T"], cpu), TensorType(DType.float32, ["M", 64], cpu)]
    with Graph("refused", input_types=types) as graph:
        good, ragged, symbolic, tokens, x = (value.tensor for value in graph.inputs)
        with pytest.raises(ContractError, match=r"encoding: expected one of Q4_0, .*, got 'Q8_K'"):
            QuantisedWeight(good, "Q8_K")
        with pytest.raises(ShapeError, match=r"blocks: expected rows of a multiple of 18 bytes.*got 19"):
            QuantisedWeight(ragged, "Q4_0")
        with pytest.raises(ShapeError, match="elements: required where the weight's size is symbolic"):
            quantised_rows(QuantisedWeight(symbolic, "Q4_0"), tokens)
        with pytest.raises(ContractError, match="weights: expected 1 to 12, got 0"):
            quantised_linear(x)
        with pytest.raises(ContractTypeError, match="x: expected dtype float32 or bfloat16, got uint8"):
            quantised_linear(good, QuantisedWeight(good, "Q4_0"))
        with pytest.raises(ShapeError, match="x: expected dimension 1 to be 32, got 64"):
            quantised_linear(x, QuantisedWeight(good, "Q4_0"))
        with pytest.raises(ContractTypeError, match="rows: expected integers, got float32"):
            quantised_rows(QuantisedWeight(good, "Q4_0"), x[:, 0])
        with pytest.raises(ShapeError, match="rows: expected rank 1, got 2"):
            quantised_rows(QuantisedWeight(good, "Q4_0"), good)
        graph.output()
