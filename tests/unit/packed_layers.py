"""Quantised layers, packed by the formats' definitions, and checkpoints that have them."""

import json

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import make_checkpoint, rewrite

N, K, GROUP = 16, 64, 16


def pack(values, bits):
    """Along the last axis, the lowest bits first: `[..., C]` as int32 `[..., C * bits / 32]`."""
    each = 32 // bits
    fields = np.asarray(values, np.uint64).reshape(*values.shape[:-1], -1, each)
    words = sum(fields[..., i] << np.uint64(bits * i) for i in range(each))
    return words.astype(np.uint32).view(np.int32)


def awq_pack(values):
    """Word i holds columns 8 i + 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first."""
    blocks = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return pack(blocks.reshape(len(values), -1), 4)


def make(kind, rows=N, inputs=K, seed=0):
    """The tensors of a layer by their last names, its weight in float64, and what config.json says."""
    random = np.random.default_rng(seed)
    method, bits, *options = kind.split()
    if "nvfp4" in options or "mxfp4" in options:
        return make_float4(method, options, random, rows, inputs)
    if method in ("fp8", "modelopt") or "float" in options:
        return make_float8(method, options, random, rows, inputs)
    if method == "hqq":
        return make_hqq(int(bits), options, random, rows, inputs)
    if method == "bitsandbytes":
        return (make_int8 if bits == "8" else make_four_bits)(options, random, rows, inputs)
    bits, half = int(bits), 1 << (int(bits) - 1)
    group = inputs if "rows" in options else 32 if "wide" in options else GROUP
    groups = inputs // group
    codes = random.integers(0, 2 * half, (rows, inputs))
    zeros = random.integers(0, 2 * half, (rows, groups))
    scales = random.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    index = np.arange(inputs) // group
    if "order" in options:
        index = random.permutation(index)
    if "symmetric" in options:
        zeros[:] = half
    weight = (codes - zeros[:, index]) * scales[:, index].astype(np.float64)
    size = -1 if "rows" in options else group
    if method == "gptq":
        stored = zeros if "v2" in options else (zeros - 1) % (2 * half)
        tensors = {"qweight": pack(codes, bits).T, "qzeros": pack(stored.T, bits), "scales": scales.T}
        tensors["g_idx"] = index.astype(np.int32)
        said = {"bits": bits, "group_size": size, "desc_act": "order" in options}
        said["sym"] = "symmetric" in options
        said["checkpoint_format"] = "gptq_v2" if "v2" in options else "gptq"
    elif method == "awq":
        tensors = {"qweight": awq_pack(codes.T), "qzeros": awq_pack(zeros.T), "scales": scales.T}
        said = {"bits": bits, "group_size": size, "version": "gemm", "zero_point": True}
    else:
        weights = {"num_bits": bits, "type": "int", "symmetric": "symmetric" in options, "group_size": size}
        weights["strategy"] = "channel" if "rows" in options else "group"
        said = {"config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
        tensors = {"weight_scale": scales}
        if "int" in options:
            said["format"] = "int-quantized"
            tensors["weight"] = (codes - half).astype(np.int8)
            tensors["weight_zero_point"] = (zeros - half).astype(np.int8)
        else:
            said["format"] = "pack-quantized"
            tensors["weight_packed"] = pack(codes, bits)
            tensors["weight_shape"] = np.array([rows, inputs])
            tensors["weight_zero_point"] = pack(zeros.T, bits).T
            if "order" in options:
                tensors["weight_g_idx"] = index.astype(np.int32)
        if "symmetric" in options:
            del tensors["weight_zero_point"]
    return tensors, weight, {"quant_method": method, **said}


def make_float8(method, options, random, rows, inputs):
    """Scales of blocks of 24 x 20, which fit no layer; of rows; or of the layer, with one of its activations."""
    high, wide = (24, 20) if "blocks" in options else (1, inputs) if "rows" in options else (rows, inputs)
    values = random.normal(0, 100, (rows, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.01, 0.1, (-(-rows // high), -(-inputs // wide))).astype(np.float32)
    weight = values.astype(np.float64) * scales[np.arange(rows)[:, None] // high, np.arange(inputs) // wide]
    tensors = {"weight": values}
    if method == "fp8":
        tensors["weight_scale_inv"] = scales if "blocks" in options else scales[0, 0]
        said = {"weight_block_size": [high, wide] if "blocks" in options else None}
        said["activation_scheme"] = "dynamic" if "blocks" in options else "static"
        if "blocks" not in options:
            tensors["activation_scale"] = np.float32(3)
        return tensors, weight, {"quant_method": "fp8", **said}
    if method == "modelopt":
        tensors |= {"weight_scale": scales[0, 0], "input_scale": np.float32(3), "k_scale": np.float32(2)}
        return tensors, weight, {"quant_method": "modelopt", "quant_algo": "FP8"}
    strategy = "block" if "blocks" in options else "channel" if "rows" in options else "tensor"
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [high, wide]}
    tensors["weight_scale"] = scales if strategy != "tensor" else scales[0]
    groups = {"group_0": {"weights": weights, "input_activations": {"dynamic": True}}}
    return tensors, weight, {"quant_method": method, "format": "float-quantized", "config_groups": groups}


def make_float4(method, options, random, rows, inputs):
    """MXFP4's powers of two for groups of 32, or NVFP4's float8 for groups of 16 with a number for the layer."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes, group = random.integers(0, 16, (rows, inputs)), 32 if "mxfp4" in options else 16
    values = np.where(codes < 8, 1.0, -1.0) * magnitudes[codes % 8]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if "mxfp4" in options:
        powers = random.integers(118, 126, (rows, inputs // group)).astype(np.uint8)
        scales, tensors = 2.0 ** (powers.astype(np.float64) - 127), {"weight_packed": packed, "weight_scale": powers}
    else:
        signs = random.choice([-1, 1], (rows, inputs // group))
        stored = (signs * random.uniform(1, 448, signs.shape)).astype(ml_dtypes.float8_e4m3fn)
        whole = np.float32(2.0**-13)
        scales, tensors = stored.astype(np.float64) * whole, {"weight_scale": stored}
        if method == "modelopt":
            tensors |= {"weight": packed, "weight_scale_2": whole, "input_scale": np.float32(3)}
        else:
            tensors |= {"weight_packed": packed, "weight_global_scale": np.array([1 / whole], np.float32)}
            tensors["input_global_scale"] = np.ones(1, np.float32)
    weights = {"num_bits": 4, "type": "float", "group_size": group, "symmetric": True}
    said = {"format": f"{options[0]}-pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    said = {"quant_algo": "NVFP4"} if method == "modelopt" else said
    return tensors, values * np.repeat(scales, group, axis=1), {"quant_method": method, **said}


def make_hqq(bits, options, random, rows, inputs):
    """Groups of 16 or 32 along rows, or (`columns`) of weights far from each other; zeros are no integers."""
    group, axis = 32 if "wide" in options else GROUP, int("columns" not in options)
    shape = (rows * inputs // group, group) if axis else (group, rows * inputs // group)
    codes, numbers = random.integers(0, 1 << bits, shape), (shape[0], 1) if axis else (1, shape[1])
    scales = random.uniform(0.01, 0.1, numbers).astype(np.float16)
    zeros = random.uniform(0, 1 << bits, numbers).astype(np.float16)
    parts, size = (10, 30) if bits == 3 else (8 // bits, 8)
    filled = np.concatenate([codes, np.zeros((-len(codes) % parts, shape[1]), np.int64)]).reshape(parts, -1, shape[1])
    packed = sum(part << size - bits * (index + 1) for index, part in enumerate(filled))
    tensors = {"W_q": packed.astype(np.int32 if bits == 3 else np.uint8), "scale": scales, "zero": zeros}
    tensors |= {"nbits": np.int32(bits), "group_size": np.int32(group), "axis": np.int32(axis)}
    tensors |= {"shape": np.array([rows, inputs]), "packing": np.zeros(9, np.uint8), "optimize": np.uint8(1)}
    weights = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "view_as_float": False}
    said = {"quant_config": {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}}
    weight = ((codes - zeros.astype(np.float64)) * scales.astype(np.float64)).reshape(rows, inputs)
    return tensors, weight, {"quant_method": "hqq", **said}


def make_four_bits(options, random, rows, inputs):
    kind = "fp4" if "fp4" in options else "nf4"
    codes, table = random.integers(0, 16, rows * inputs), random.normal(size=16).astype(np.float32)
    blocks = -(-rows * inputs // 64)
    tensors = {"weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table}
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, inputs]}
    if "nested" in options:
        places, known = random.integers(0, 256, blocks), random.normal(size=256).astype(np.float32)
        scales = random.uniform(0.1, 1, -(-blocks // 256)).astype(np.float32)
        magnitudes = known[places].astype(np.float64) * scales[np.arange(blocks) // 256] + 0.375
        tensors |= {"weight.absmax": places.astype(np.uint8), "weight.nested_absmax": scales}
        tensors["weight.nested_quant_map"] = known
        state |= {"nested_blocksize": 256, "nested_offset": 0.375, "nested_dtype": "float32"}
    else:
        magnitudes = random.uniform(0.01, 0.1, blocks).astype(np.float32)
        tensors["weight.absmax"] = magnitudes
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    weight = table[codes].astype(np.float64) * magnitudes[np.arange(rows * inputs) // 64]
    said = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": "nested" in options}
    return tensors, weight.reshape(rows, inputs), {"quant_method": "bitsandbytes", **said}


def make_int8(_, random, rows, inputs):
    codes, scales = random.integers(-127, 128, (rows, inputs)), random.uniform(1, 9, rows).astype(np.float32)
    tensors = {"weight": codes.astype(np.int8), "SCB": scales, "weight_format": np.uint8(0)}
    weight = codes * scales[:, None].astype(np.float64) / 127
    return tensors, weight, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def as_torch(array):
    """A torch tensor of any dtype of a layer."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def quantise(folder, kind, damage=lambda _: None):
    """A checkpoint whose attention is quantised: the weights that it stands for by name, and the tensors."""
    make_checkpoint(folder, hidden_size=64, intermediate_size=64, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for number, name in enumerate([name for name in tensors if "self_attn" in name and name.endswith("weight")]):
        parts, weight, said = make(kind, *tensors.pop(name).shape, seed=number)
        expected[name] = weight
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": as_torch(v) for part, v in parts.items()}
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder / "config.json", quantization_config=said)
    return expected, tensors
