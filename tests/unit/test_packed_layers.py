"""Quantised checkpoints: layers packed here by the formats' definitions are read back, faults refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef
from safetensors.torch import load_file, save_file

from paged_kv.checkpoint.packing import read_packing
from paged_kv.checkpoint.source import open_source
from paged_kv.cli import _run
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.fields import Fields
from support.checkpoints import make_checkpoint, rewrite, to_torch, write_config
from support.gguf_blocks import dequantise
from support.refusals import refused
from unit.packed_layers import K, N, as_torch, make, quantise

KINDS = [
    "gptq 4", "gptq 8", "gptq 4 v2", "gptq 4 order", "gptq 8 rows", "awq 4", "awq 4 rows",
    "compressed-tensors 4", "compressed-tensors 4 symmetric", "compressed-tensors 8 symmetric rows",
    "compressed-tensors 4 order", "compressed-tensors 8 int", "compressed-tensors 8 int symmetric rows",
]  # fmt: skip


OTHERS = [
    "fp8 8 blocks", "fp8 8", "compressed-tensors 8 float blocks", "compressed-tensors 8 float rows",
    "compressed-tensors 8 float", "modelopt 8", "compressed-tensors 4 nvfp4", "modelopt 4 nvfp4",
    "bitsandbytes 4 nf4 nested", "bitsandbytes 4 nf4", "bitsandbytes 4 fp4",
    "hqq 4 columns", "hqq 3", "hqq 2", "hqq 1", "hqq 8", "bitsandbytes 8",
]  # fmt: skip
"""Those that are no integers with groups."""

IN_BLOCKS = {
    "gptq 4 wide": "INT4", "gptq 4 symmetric wide": "Q4_0", "gptq 8 rows": "INT8", "gptq 8 symmetric wide": "Q8_0",
    "awq 4 wide": "INT4", "awq 4 rows": "INT4", "compressed-tensors 4 wide": "INT4",
    "compressed-tensors 4 symmetric wide": "Q4_0", "compressed-tensors 8 int wide": "INT8",
    "compressed-tensors 8 symmetric rows": "Q8_0", "compressed-tensors 4 mxfp4": "MXFP4",
    "compressed-tensors 4 nvfp4": "NVFP4", "modelopt 4 nvfp4": "NVFP4",
}  # fmt: skip
"""The layers that stay packed, and as which blocks."""


def packing_of(said):
    return read_packing(Fields("config.json", {"quantization_config": said}))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_unpacked(kind):
    """In the common layout, and equal to the weight: both are exact in float32."""
    tensors, weight, said = make(kind)
    layer = packing_of(said).unpack(N, K, tensors.get)
    groups = layer.scales.shape[1]
    assert layer.codes.shape == (N, K)
    assert (layer.codes.dtype == np.uint8) == (layer.zeros is not None) == ("symmetric" not in kind)
    assert layer.zeros is None or (layer.zeros.shape == (N, groups) and layer.zeros.dtype == np.uint8)
    assert (layer.order is not None) == ("order" in kind)
    np.testing.assert_allclose(layer.dequantised(), weight, rtol=1e-6)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("shape", [(N, K), (72, 80), (9, 30), (300, 256)])
def test_other_layers_are_dequantised(kind, shape):
    if "nvfp4" in kind and shape[1] % 16:
        with pytest.raises(ValueError, match="30 inputs are no multiple of groups of 16"):
            packing_of(make(kind)[2]).tensors(*shape)
        return
    if kind.startswith("hqq") and shape == (9, 30):
        with pytest.raises(ValueError, match="9 x 30 weights are no multiple of groups of 16"):
            packing_of(make(kind)[2]).tensors(*shape)
        return
    tensors, weight, said = make(kind, *shape)
    packing = packing_of(said)
    assert {name for name, (*_, required) in packing.tensors(*shape).items() if required} <= set(tensors)
    np.testing.assert_allclose(packing.unpack(*shape, tensors.get).dequantised(), weight, rtol=1e-5, atol=1e-7)
    assert packing.encoding(80) is None
    in_blocks = "Q8_0" if kind == "bitsandbytes 8" else "NVFP4" if "nvfp4" in kind else None
    assert packing.encoding(64) == in_blocks


def test_rows_of_int8_become_blocks():
    """Their scales are rounded to float16."""
    tensors, weight, said = make("bitsandbytes 8", 24, 64)
    blocks = packing_of(said).unpack(24, 64, tensors.get).blocks("Q8_0")
    np.testing.assert_allclose(dequantise(blocks, "Q8_0"), weight, rtol=5e-4)


def test_hqq_of_4_bits_becomes_blocks():
    """Scales and what zeros take away are rounded to float16."""
    tensors, weight, said = make("hqq 4 wide", 24, 64)
    packing = packing_of(said)
    assert (packing.encoding(64), packing.encoding(48)) == ("Q4_1", None)
    blocks = packing.unpack(24, 64, tensors.get).blocks("Q4_1")
    np.testing.assert_allclose(dequantise(blocks, "Q4_1"), weight, rtol=5e-4, atol=8e-4)


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_layers_are_put_into_blocks(kind):
    """Products of the same weights, exactly."""
    tensors, weight, said = make(kind, 24, 128)
    packing = packing_of(said)
    assert packing.encoding(128) == IN_BLOCKS[kind]
    blocks = packing.unpack(24, 128, tensors.get).blocks(IN_BLOCKS[kind])
    np.testing.assert_array_equal(dequantise(blocks, IN_BLOCKS[kind]), weight.astype(np.float32))


@pytest.mark.parametrize("kind", ["gptq 4", "gptq 4 order wide", "compressed-tensors 4"])
def test_what_is_dequantised_instead(kind):
    assert packing_of(make(kind)[2]).encoding(K) is None


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[5], KINDS[8], KINDS[11], *OTHERS[:6], *OTHERS[8:-1]])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_checkpoints_are_dequantised(tmp_path, kind, dtype):
    expected, tensors = quantise(tmp_path, kind)
    source = open_source(tmp_path)
    loaded = source.load(dtype)
    assert len(expected) == 8
    for name, weight in expected.items():
        rounded = weight.astype(np.float32).astype(ml_dtypes.bfloat16) if dtype == DType.bfloat16 else weight
        got = to_torch(loaded[name]).float().numpy()
        np.testing.assert_allclose(got, rounded.astype(np.float32), rtol=1e-6 if dtype == DType.float32 else 0.008)
    plain = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(to_torch(loaded[plain]).float(), tensors[plain].to(to_torch(loaded[plain]).dtype).float())


@pytest.mark.parametrize("kind", ["gptq 4 symmetric wide", "awq 4 wide", "compressed-tensors 8 int wide",
                                  "compressed-tensors 4 mxfp4", "modelopt 4 nvfp4"])  # fmt: skip
def test_checkpoints_stay_packed(tmp_path, kind):
    expected, _ = quantise(tmp_path, kind)
    source = open_source(tmp_path)
    assert dict(source.config.encodings) == dict.fromkeys(expected, IN_BLOCKS[kind])
    loaded = source.load(DType.bfloat16)
    for name, weight in expected.items():
        np.testing.assert_array_equal(dequantise(loaded[name], IN_BLOCKS[kind]), weight.astype(np.float32))
    on_gpu = source.on(DeviceRef.GPU())
    assert on_gpu.config.encodings == ()
    assert {array.dtype.name for array in on_gpu.load(DType.bfloat16).values()} == {"bfloat16"}


def test_experts_that_lie_apart_become_a_stack_of_blocks(tmp_path):
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    make_checkpoint(tmp_path, family="Qwen3Moe", dtype=torch.float32, **sizes)
    tensors, stacks = load_file(tmp_path / "model.safetensors"), {}
    for number, name in enumerate(sorted(name for name in tensors if ".experts." in name)):
        parts, weight, said = make("awq 4 wide", *tensors.pop(name).shape, seed=number)
        at, expert, part, _ = name.rsplit(".", 3)
        stacks.setdefault(at, {})[int(expert), part] = weight
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": as_torch(v) for part, v in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite(tmp_path / "config.json", quantization_config=said)
    source = open_source(tmp_path)
    loaded = source.load(DType.float32)
    for at, weights in stacks.items():
        for expert in range(3):
            gate, up, down = (weights[expert, f"{name}_proj"] for name in ("gate", "up", "down"))
            for name, expected in (("gate_up", np.concatenate([gate, up])), ("down", down)):
                found = f"{at}.{name}_proj.weight"
                assert dict(source.config.encodings)[found] == "INT4"
                got = dequantise(loaded[found][expert], "INT4")
                np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_heads_that_share_a_packed_layer_are_dequantised(tmp_path):
    """DeepSeek's kv_b_proj has rows of both; those of keys are put together transposed, which blocks are not."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "q_lora_rank": None}
    make_checkpoint(tmp_path, family="DeepseekV2", num_key_value_heads=4, first_k_dense_replace=2, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj"
    parts, weight, said = make("awq 4 wide", *tensors.pop(f"{name}.weight").shape)
    tensors |= {f"{name}.{part}": as_torch(v) for part, v in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite(tmp_path / "config.json", quantization_config=said)
    source = open_source(tmp_path)
    assert source.config.encodings == ()
    found = to_torch(source.load(DType.float32)["model.layers.0.self_attn.k_up_proj.weight"])
    expected = weight.astype(np.float32).reshape(4, 40, 32)[:, :16].swapaxes(1, 2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


LAYER = "model.layers.1.self_attn.k_proj"


def change(part, new):
    def damage(tensors):
        tensors[f"{LAYER}.{part}"] = new(tensors[f"{LAYER}.{part}"])

    return damage


def put(part, value):
    return lambda tensors: tensors.update({f"{LAYER}.{part}": value})


def with_nan(tensor):
    tensor = tensor.clone()
    tensor[0, 0] = float("nan")
    return tensor


OTHER_STATE = bytearray(b'{"blocksize":64,"shape":[8,8]}')
FAULTS = {
    "missing": ("gptq 4", lambda t: t.pop(f"{LAYER}.qzeros"), r"tensor \S+k_proj\.qzeros is missing"),
    "shape": ("gptq 4", change("scales", lambda v: v[:-1].clone()),
        r"k_proj\.scales: expected shape .*, got \[3, 32\]"),
    "dtype": ("awq 4", change("qweight", lambda v: v.float()), r"k_proj\.qweight: expected dtype I32, got F32"),
    "scale": ("awq 4", change("scales", with_nan), r"layer \S+k_proj: a scale is not finite"),
    "order": ("gptq 4 order", change("g_idx", lambda v: v * 0), r"k_proj: g_idx does not put 16 inputs into each of 4"),
    "shape tensor": ("compressed-tensors 4", change("weight_shape", lambda v: v * 2),
        r"k_proj: weight_shape is \[64, 128\], expected \[32, 64\]"),
    "large scale": ("awq 4 wide", change("scales", lambda v: v.float() * 1e8),
        r"layer \S+k_proj: a scale is larger than float16 holds"),
    "zero": ("gptq 4 symmetric wide", change("qzeros", lambda v: v + 1),
        r"layer \S+k_proj: a zero is not 8, though all are said to be"),
    "order that nothing announces": ("gptq 4 wide", change("g_idx", lambda v: v.flip(0).contiguous()),
        r"layer \S+k_proj: g_idx is not in order, though no reordering is announced"),
    "float8's dtype": ("fp8 8", change("weight", lambda v: v.float()),
        r"k_proj\.weight: expected dtype F8_E4M3, got F32"),
    "float8's blocks": ("fp8 8 blocks", change("weight_scale_inv", lambda v: v[:, :-1].clone()),
        r"k_proj\.weight_scale_inv: expected shape \[2, 4\], got \[2, 3\]"),
    "float8's scale": ("fp8 8", change("weight_scale_inv", lambda v: v * np.inf),
        r"layer \S+k_proj: a scale is not fin"),
    "scales of columns": ("compressed-tensors 8 float rows", change("weight_scale", lambda v: v.T.contiguous()),
        r"k_proj\.weight_scale: expected shape \[32, 1\], got \[1, 32\]"),
    "float4's scale": ("compressed-tensors 4 mxfp4", change("weight_scale", lambda v: v * 0 + 255),
        r"layer \S+k_proj: a scale is not finite"),
    "float4's number": ("compressed-tensors 4 nvfp4", change("weight_global_scale", lambda v: v * 0),
        r"layer \S+k_proj: a scale is not finite"),
    "float4 without its number": ("modelopt 4 nvfp4", lambda t: t.pop(f"{LAYER}.weight_scale_2"),
        r"tensor \S+k_proj\.weight_scale_2 is missing"),
    "HQQ's number": ("hqq 3", change("nbits", lambda v: v + 1),
        r"layer \S+k_proj: nbits is 4, the configuration says 3"),
    "HQQ's zero": ("hqq 2", change("zero", lambda v: v / 0), r"layer \S+k_proj: a scale or a zero is not finite"),
    "state": ("bitsandbytes 4 nf4 nested", change("weight.quant_state.bitsandbytes__nf4", lambda v: v[:-1].clone()),
        r"layer \S+k_proj: weight\.quant_state\.bitsandbytes__nf4 is no state of a layer"),
    "state of another layer": ("bitsandbytes 4 nf4",
        put("weight.quant_state.bitsandbytes__nf4", torch.frombuffer(OTHER_STATE, dtype=torch.uint8)),
        r"k_proj: weight\.quant_state\S+ has blocksize, shape and nested_blocksize \[64, \[8, 8\], 256\], expected"),
    "magnitude": ("bitsandbytes 4 nf4", change("weight.absmax", lambda v: v * np.nan),
        r"layer \S+k_proj: a magnitude of a block is not finite"),
    "columns": ("bitsandbytes 8", change("weight_format", lambda v: v + 1), r"k_proj: weight_format is 1, expected 0"),
    "bias": ("gptq 4", put("bias", torch.ones(32)), r"k_proj\.bias is no part of the model"),
    "more": ("gptq 4", put("lora", torch.ones(32)), r"k_proj\.lora is no part of the model"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_checkpoints_are_refused(tmp_path, fault):
    kind, damage, message = FAULTS[fault]
    quantise(tmp_path, kind, damage)
    refused(open_source(tmp_path).load, DType.float32, match=message)


def test_biases_of_zeros_are_ignored(tmp_path):
    """Some writers store them for layers that have none."""
    expected, _ = quantise(tmp_path, "gptq 4", put("bias", torch.zeros(32)))
    assert f"{LAYER}.bias" not in open_source(tmp_path).load(DType.float32)
    assert f"{LAYER}.weight" in expected


def compressed(**weights):
    said = make("compressed-tensors 4")[2]
    said["config_groups"]["group_0"]["weights"] |= weights
    return said


def hqq(**weights):
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "quanto"}, "quantization_config: quantized .* not supported, but for.*, got .*"),
        ({"quant_method": ["fp8"]}, "quantization_config: quantized .* not supported, but for.*, got .*"),
        (make("fp8 8")[2] | {"fmt": "e5m2"}, 'fmt: expected "e4m3".*, got "e5m2"'),
        (
            make("fp8 8")[2] | {"weight_block_size": [128]},
            r"weight_block_size: expected a list of two positive.*, got \[128\]",
        ),
        (
            make("bitsandbytes 8")[2] | {"load_in_4bit": True},
            "load_in_4bit: expected one of load_in_4bit and.*, got true",
        ),
        (
            make("bitsandbytes 4 nf4")[2] | {"bnb_4bit_quant_storage": "bfloat16"},
            'bnb_4bit_quant_storage: .*, got "bfloat16"',
        ),
        (make("gptq 4")[2] | {"bits": 3}, r"quantization_config\.bits: expected 4 or 8.*, got 3"),
        (make("gptq 4")[2] | {"group_size": 0}, r"group_size: expected a positive integer.*, got 0"),
        (make("gptq 4")[2] | {"checkpoint_format": "marlin"}, r'checkpoint_format: .*, got "marlin"'),
        (make("gptq 4")[2] | {"dynamic": {"-:x": {}}}, "dynamic: layers of different bits.*, got .*"),
        (make("awq 4")[2] | {"version": "gemv"}, r'version: expected "gemm".*, got "gemv"'),
        (make("awq 4")[2] | {"bits": 8}, r"bits: expected 4.*, got 8"),
        (make("awq 4")[2] | {"zero_point": False}, "zero_point: layers without zeros.*, got false"),
        ({"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {}}}, "weight_quant_params of all layers"),
        (hqq(nbits=6), "nbits: expected 1, 2, 3, 4 or 8.*, got 6"),
        (hqq(group_size=None), "group_size: one group for a row.*, got null"),
        (hqq(channel_wise=False), "channel_wise: one scale for a layer.*, got false"),
        (hqq(view_as_float=True), "view_as_float: not supported.*, got true"),
        (compressed() | {"format": "marlin-24"}, 'format: .*, got "marlin-24"'),
        (compressed() | {"format": "nvfp4-pack-quantized"}, r'weights\.type: expected "float".*, got "int"'),
        (compressed(type="float") | {"format": "mxfp4-pack-quantized"}, r"group_size: expected 32.*, got 16"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 'quant_algo: .*, got "W4A8_AWQ"'),
        (compressed() | {"format": "float-quantized"}, r'weights\.type: expected "float".*, got "int"'),
        (compressed(type="float"), r'config_groups\.group_0\.weights\.type: .*, got "float"'),
        (compressed(strategy="block"), 'strategy: .*, got "block"'),
        (compressed(num_bits=2), "num_bits: expected 4 or 8.*, got 2"),
        (compressed() | {"config_groups": {}}, "config_groups: expected one group of layers.*, got {}"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path, said, message):
    write_config(tmp_path, quantization_config=said)
    refused(open_source, tmp_path, match=message)


@pytest.mark.parametrize("kind", ["gptq 4", "awq 4", "compressed-tensors 4"])
def test_odd_groups_are_refused(tmp_path, kind):
    quantise(tmp_path, kind)
    source = open_source(tmp_path)
    odd = dataclasses.replace(source.checkpoint, packing=dataclasses.replace(source.checkpoint.packing, group=48))
    refused(odd.load, source.config, DType.float32, match="64 inputs are no multiple of groups of 48")


def test_generate_says_it_in_a_line(tmp_path, monkeypatch, capsys):
    def no_model(*_, **__):
        raise CheckpointError("no model")

    monkeypatch.setattr("paged_kv.commands.generation.load_model", no_model)
    quantise(tmp_path, "awq 4")
    assert _run(["generate", "--model", str(tmp_path), "--prompt", "a", "--dtype", "bfloat16"]) == 2
    assert "AWQ weights of 4 bits are dequantised to bfloat16 at load\n" in capsys.readouterr().err
    (tmp_path / "packed").mkdir()
    quantise(tmp_path / "packed", "awq 4 wide")
    assert _run(["generate", "--model", str(tmp_path / "packed"), "--prompt", "a", "--dtype", "bfloat16"]) == 2
    assert "AWQ weights of 4 bits stay packed, as INT4\n" in capsys.readouterr().err
