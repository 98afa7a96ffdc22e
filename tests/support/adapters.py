"""LoRA adapters of noise: as PEFT saves them, as llama.cpp's converter does, and merged into a model's weights."""

import json

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file


def noise(sizes, rank, seed):
    """A and B of layers by name: `sizes` are the shapes `[out, in]` of their weights."""
    rng = np.random.default_rng(seed)
    shapes = {layer: ((rank, columns), (rows, rank)) for layer, (rows, columns) in sizes.items()}
    return {
        layer: tuple((rng.standard_normal(shape) * 0.15).astype(np.float32) for shape in pair)
        for layer, pair in shapes.items()
    }


def write_peft(folder, layers, rank, alpha, *, tensors=None, **config):
    """A folder as PEFT saves it; `tensors` are further ones, and `config` further keys."""
    folder.mkdir(parents=True)
    named = {
        f"{name}.lora_{half}.weight": each
        for name, pair in layers.items()
        for half, each in zip("AB", pair, strict=True)
    }
    values = {f"base_model.model.{name}": each for name, each in named.items()} | (tensors or {})
    save_file(values, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def write_gguf_adapter(file, layers, alpha, heads, *, architecture="llama", **metadata):
    """A file as llama.cpp's converter writes it; `heads` are those of q and of k, whose rows it reorders."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | metadata).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    for layer, (a, b) in layers.items():
        count = dict(zip(("q_proj", "k_proj"), heads, strict=True)).get(layer.rpartition(".")[2])
        if count:
            b = b.reshape(count, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        stored = names.get_name(f"{layer}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{stored}.lora_a", a)
        writer.add_tensor(f"{stored}.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def merged(model, layers, scale):
    """Adds adapters to the weights of transformers' model."""
    with torch.no_grad():
        for layer, (a, b) in layers.items():
            model.get_parameter(f"{layer}.weight").add_(torch.from_numpy(scale * (b.astype(np.float64) @ a)))
    return model
