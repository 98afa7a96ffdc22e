"""Layers of GPTQ, AWQ and compressed-tensors, packed by the formats' definitions, and checkpoints that have them."""

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
        tensors = {
            "qweight": pack(codes, bits).T,
            "qzeros": pack(stored.T, bits),
            "scales": scales.T,
            "g_idx": index.astype(np.int32),
        }
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


def quantise(folder, kind, damage=lambda _: None):
    """A checkpoint whose attention is quantised: the weights that it stands for by name, and the tensors."""
    make_checkpoint(folder, hidden_size=64, intermediate_size=64, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for number, name in enumerate([name for name in tensors if "self_attn" in name and name.endswith("weight")]):
        parts, weight, said = make(kind, *tensors.pop(name).shape, seed=number)
        expected[name] = weight
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": torch.from_numpy(np.ascontiguousarray(v)) for part, v in parts.items()}
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder / "config.json", quantization_config=said)
    return expected, tensors
