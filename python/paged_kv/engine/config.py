"""Reads a Hugging Face folder's `config.json`, checked field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.llama import LlamaConfig, RopeScaling
from paged_kv.options import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, Q_DTYPES, is_head_dim


def checkpoint_folder(folder: Path | str) -> Path:
    """`folder` as a path.

    Raises:
        CheckpointError: it is no folder.
    """
    path = Path(folder)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    return path


def load_config(folder: Path | str) -> LlamaConfig:
    """The model that a folder's `config.json` describes, with the end-of-sequence tokens of `generation_config.json`.

    Raises:
        CheckpointError: the folder or the file is missing, or a field is missing, of a wrong type or of a value
            that this package does not run. The message names file, key and value.
    """
    fields = _Fields.read(checkpoint_folder(folder) / "config.json")
    _refuse_unsupported(fields)

    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    hidden = fields.integer("hidden_size")
    # A missing head_dim is hidden_size / num_attention_heads, which must be an integer.
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"no multiple of num_attention_heads = {heads}, and there is no head_dim")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"does not divide num_attention_heads = {heads}", kv_heads)
    if not is_head_dim(head_dim):
        problem = f"must be a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_HEAD_DIM}"
        raise fields.error("head_dim", problem, head_dim)

    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = _rope(fields, max_positions)
    eos = fields.tokens("eos_token_id", vocab_size)
    generation_file = fields.file.with_name("generation_config.json")
    if generation_file.is_file():
        generation = _Fields.read(generation_file)
        if generation.get("eos_token_id") is not None:
            eos = generation.tokens("eos_token_id", vocab_size)
    bos = fields.tokens("bos_token_id", vocab_size)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        dtype=_dtype(fields),
    )


@dataclass(frozen=True)
class _Fields:
    """A JSON object in a file: typed access, with errors that name file, key and value.

    `null` is the same as a missing key. `prefix` is where in the file the object lies.
    """

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, file: Path) -> _Fields:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file")
        try:
            values = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: a JSON object is expected, found {type(values).__name__}")
        return cls(file, values)

    def error(self, key: str, problem: str, value: object = None) -> CheckpointError:
        """`value` is the one to show where it is a default, not in the file."""
        value = self.get(key) if value is None else value
        return CheckpointError(f"{self.file}: {self.prefix}{key} = {json.dumps(value)}: {problem}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> _Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object is expected")
        return _Fields(self.file, value, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a positive integer is expected", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a positive number is expected", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        """True or false; false where missing."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "true or false is expected")
        return value

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise self.error(key, f"token ids from 0 to vocab_size - 1 = {vocab_size - 1} are expected")
        return tuple(ids)

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.file}: {self.prefix}{key} is missing")
        return default


def _refuse_unsupported(fields: _Fields) -> None:
    """Refuses every model that this graph would compute wrongly."""
    architectures = fields.get("architectures")
    if architectures is None:
        if fields.get("model_type") != LlamaConfig.model_type:
            raise fields.error("model_type", f'only "{LlamaConfig.model_type}" is supported')
    elif not isinstance(architectures, list) or LlamaConfig.architecture not in architectures:
        raise fields.error("architectures", f'only "{LlamaConfig.architecture}" is supported')
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", 'only "silu" is supported')
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key):
            raise fields.error(key, "projections with a bias are not supported")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized checkpoints are not supported")


def _rope(fields: _Fields, max_positions: int) -> tuple[float, RopeScaling]:
    """Theta and scaling from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    for section in (fields, rope):
        if section is not None and section.number("partial_rotary_factor", default=1.0) != 1.0:
            raise section.error("partial_rotary_factor", "only 1 is supported")
    theta = fields.number("rope_theta", default=10000.0)
    if rope is None:
        return theta, RopeScaling()
    theta = rope.number("rope_theta", default=theta)
    # Older files call the key "type".
    key = "type" if rope.get("rope_type") is None else "rope_type"
    kind = rope.get(key)
    if kind is None or kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise rope.error(key, 'only "default", "linear" and "llama3" are supported')
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor = {low:g}")
    context = rope.integer("original_max_position_embeddings", default=max_positions)
    return theta, RopeScaling("llama3", rope.number("factor"), low, high, context)


def _dtype(fields: _Fields) -> str | None:
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    dtype = fields.get(key)
    if dtype is not None and dtype not in Q_DTYPES:
        raise fields.error(key, 'only "float32", "bfloat16" and "float16" are supported')
    return None if dtype is None else str(dtype)
