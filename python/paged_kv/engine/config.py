"""What a Hugging Face folder says about a Llama model: `config.json`, checked field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paged_kv.errors import CheckpointError

MAX_HEAD_DIM = 512

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than the trained one.

    `linear` uses `factor` alone. The other three fields belong to `llama3`.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama model, and what generation needs to know of it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None

    @classmethod
    def from_folder(cls, folder: Path | str) -> LlamaConfig:
        """Reads `config.json`, and the end-of-sequence tokens of `generation_config.json` where there is one.

        Raises:
            CheckpointError: the folder or the file is missing, or a field is missing, of a wrong type or of a value
                that this package does not run. The message names file, key and value.
        """
        fields = _Fields.read(checkpoint_folder(folder) / "config.json")
        _refuse_unsupported(fields)

        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", default=heads)
        hidden = fields.integer("hidden_size")
        # A missing head_dim is the hidden size cut into heads. A fraction left over would be cut off in silence.
        head_dim = fields.integer("head_dim", default=hidden // heads)
        if fields.get("head_dim") is None and hidden % heads:
            raise fields.error("hidden_size", f"no multiple of num_attention_heads = {heads}, and there is no head_dim")
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"does not divide num_attention_heads = {heads}", kv_heads)
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise fields.error("head_dim", f"must be a multiple of 8 and at most {MAX_HEAD_DIM}", head_dim)

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
        return cls(
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

    def inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """The rotary frequency of each pair of dimensions, `[head_dim / 2]` float32, scaling included.

        Follows transformers' float32 steps: nearly all frequencies are bit-equal to its own, the rest one rounding off.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        # The power is rounded once, from float64: NumPy's float32 power is less exact than torch's.
        powers = np.power(np.float64(np.float32(self.rope_theta)), exponents.astype(np.float64)).astype(np.float32)
        frequencies = np.float32(1) / powers
        scaling = self.rope_scaling
        factor = np.float32(scaling.factor)
        if scaling.rope_type == "default":
            return frequencies
        if scaling.rope_type == "linear":
            return frequencies / factor

        # Llama 3: long waves are stretched, short ones kept, and those between are blended.
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        context = scaling.original_max_position_embeddings
        wavelengths = np.float32(2 * math.pi) * (1 / frequencies)  # torch divides a scalar by an array in two steps
        blend = (np.float32(context) * (1 / wavelengths) - np.float32(low)) / np.float32(high - low)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        is_long = wavelengths > np.float32(context / low)
        is_short = wavelengths < np.float32(context / high)
        return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, blended))


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


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and shape of every weight of the model; linear layers are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


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
    """Refuses every model that these weights and this graph would compute wrongly."""
    architectures = fields.get("architectures")
    if architectures is None:
        if fields.get("model_type") != "llama":
            raise fields.error("model_type", 'only "llama" is supported')
    elif not isinstance(architectures, list) or "LlamaForCausalLM" not in architectures:
        raise fields.error("architectures", 'only "LlamaForCausalLM" is supported')
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
    # "type" is the name that the key had at first.
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
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise fields.error(key, 'only "float32", "bfloat16" and "float16" are supported')
    return None if dtype is None else str(dtype)
