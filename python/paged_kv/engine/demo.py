"""A small Llama checkpoint made from a seed, in the format of real ones, for the demo and for tests.

Its weights are random, so its text is noise. Any machine can make it, without a download.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from paged_kv.checkpoint.config import checkpoint_path, load_config
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.tensors import expected_tensors

# To raise whenever the same seed gives other files: older folders are then written again.
VERSION = 2
_STAMP = "demo.json"  # written last, says what the folder is

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "float32",
}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True)),
    "clean_up_tokenization_spaces": False,
    "model_max_length": _CONFIG["max_position_embeddings"],
    "chat_template": CHAT_TEMPLATE,
}
"""For transformers, which servers use."""


def write_demo_checkpoint(folder: Path | str, *, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder` and returns it as a path. One that is already there is left as it is.

    A reader sees the whole checkpoint or none: it is made in a folder beside `folder` and renamed.

    Raises:
        ContractTypeError: `folder` is no path.
        CheckpointError: it is there and is not a demo checkpoint, or it cannot be written.
    """
    path = checkpoint_path(folder)
    stamp = _stamp(path)
    if _is_complete(path, stamp, seed):
        return path
    if stamp is None and path.exists() and not _is_empty_folder(path):
        raise CheckpointError(f"{path}: is there already and is no demo checkpoint: it is not overwritten")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as made:
            new, old = Path(made) / "new", Path(made) / "old"
            new.mkdir()
            _write(new, seed)
            if path.exists():
                path.rename(old)
            _move(new, path, seed)
    except Exception as error:  # OSError; what writes weights and tokenizers has errors of other types for a full disk
        raise CheckpointError(f"{path}: the demo checkpoint cannot be written: {error}") from None
    return path


def byte_tokenizer(*, add_bos: bool = True) -> Tokenizer:
    """A byte-level BPE tokenizer without merges: ids 0 to 255 are the bytes, in the alphabet's order, then specials."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
        )
    return tokenizer


def _stamp(path: Path) -> dict[str, Any] | None:
    """Return what a demo folder says of itself, None for anything else."""
    try:
        stamp = json.loads(read_regular(path / _STAMP))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _is_complete(path: Path, stamp: dict[str, Any] | None, seed: int) -> bool:
    """Return whether every file is there in its full size, and of this version and seed."""
    if stamp is None or (stamp.get("version"), stamp.get("seed")) != (VERSION, seed):
        return False
    return bool(stamp.get("bytes") == _sizes(path))


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.name != _STAMP}


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _move(new: Path, path: Path, seed: int) -> None:
    try:
        new.rename(path)
    except OSError:
        # Another process made the same checkpoint at the same time: either will do.
        if not _is_complete(path, _stamp(path), seed):
            raise


def _write(folder: Path, seed: int) -> None:
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    generation = {key: _CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER, indent=2))
    weights = _weights(load_config(folder), tokenizer, seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / _STAMP).write_text(json.dumps({"version": VERSION, "seed": seed, "bytes": _sizes(folder)}))


def _weights(config: DecoderConfig, tokenizer: Tokenizer, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.Generator(np.random.PCG64(seed))
    weights = {}
    for name, shape in expected_tensors(config).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        # Linear layers keep the size of what they get; a norm scales around one.
        is_norm = len(shape) == 1
        weights[name] = 1 + np.float32(0.1) * noise if is_norm else noise / np.float32(np.sqrt(shape[1]))
        # Sharp attention: with an even one, the text soon repeats one letter.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] *= 2
    # Logits a few units wide, so that one token stands out; only letters and spaces, so that a terminal can show them.
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz ,.", add_special_tokens=False).ids
    scale = np.full((config.vocab_size, 1), 0.1, np.float32)
    scale[letters] = 4
    weights["lm_head.weight"] *= scale
    return weights
