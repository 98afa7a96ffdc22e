"""Small Llama checkpoints for tests: folders by hand, and whole ones saved by transformers."""

import json

import numpy as np
import torch
import transformers
from max.dtype import DType

from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo import VOCAB_SIZE, byte_tokenizer
from paged_kv.graphs.models.tensors import checkpoint_tensors

TORCH = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16, DType.float16: torch.float16}
# What every config.json must say; the rest has defaults.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""`rope_parameters`."""


def write_config(folder, *, drop=(), **overrides):
    """Writes `config.json`: `CONFIG` with `overrides` and without the keys in `drop`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in (CONFIG | overrides).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def rewrite(file, **changes):
    """Other values in a file of JSON, and new ones."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def read_config(folder, **overrides):
    return load_config(write_config(folder, **overrides))


def read(folder, values, **overrides):
    """The configuration of a `config.json` that says these values alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | overrides))
    return load_config(folder)


def random_tensors(config, dtype=torch.float32, seed=0):
    """The tensors of a model of this `config`, standard normal."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for name, shape in checkpoint_tensors(config).items()
    }


def raw_safetensors(tensors, padding=0):
    """A file's bytes from {name: (safetensors dtype, shape, data)}; `padding` spaces in the header shift the data."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56 + padding)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def bits(tensor):
    """A torch tensor as a NumPy array of its bits."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy()


def to_torch(array):
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))


def assert_same(arrays, tensors):
    """The loaded arrays hold the bits of the torch tensors; one NaN is as good as another."""
    for name, tensor in tensors.items():
        got = to_torch(arrays[name])
        nan = got.isnan().numpy()
        assert np.array_equal(nan, tensor.isnan()), name
        np.testing.assert_array_equal(bits(got)[~nan], bits(tensor)[~nan], err_msg=name)


def make_checkpoint(
    folder, *, family="Llama", seed=0, dtype=torch.float32, max_shard_size="5GB", add_bos=True, **overrides
):
    """A checkpoint that transformers saves, with a byte-level `tokenizer.json`, and its model.

    `overrides` go to transformers' configuration of the family. There is no end-of-sequence token unless they name one.
    """
    values = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    of_text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    config_class = getattr(transformers, f"{family}{of_text}Config")
    config = config_class(**(values | tokens | overrides))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Every weight matters: a norm of all ones would hide that it is not applied.
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
            if name.endswith("A_log"):  # states last for some tokens to some dozens
                parameter.sub_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer(add_bos=add_bos).save(str(folder / "tokenizer.json"))
    return model


def relative_error(got, expected):
    """The largest difference, relative to the largest expected value."""
    expected = np.asarray(expected, np.float64)
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max())
