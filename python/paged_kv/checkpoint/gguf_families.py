"""GGUF's terms in Hugging Face's: what a file's metadata is as a `config.json`, and what its tensors are called.

llama.cpp's converter writes GGUF files, and changes a few weights on the way; what is undone here is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.end_tokens import FILL_IN_ENDS, end_tokens
from paged_kv.checkpoint.gguf_header import GgufHeader, Strings
from paged_kv.checkpoint.gguf_tokenizer import end_texts
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models import FAMILIES
from paged_kv.graphs.models.config import THETA
from paged_kv.graphs.models.fields import MAX_SIZE, Fields
from paged_kv.graphs.rope import Llama3, Rope

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies: Llama 3's scaling, already applied to each pair of dimensions."""
_MAX_DIVISOR = 1e9
LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


@dataclass(frozen=True)
class GgufFamily:
    """How one of GGUF's architectures differs from the others."""

    architecture: str
    """Hugging Face's name."""
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """Names of a layer's tensors: Hugging Face's to GGUF's."""
    rotates_neighbours: bool = False
    """Rotation turns elements 2i and 2i + 1: the rows of q and k were reordered for it, and are put back."""
    norm_offset: float = 0.0
    """What the converter has added to the weights of all norms."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata has no words for."""
    scalars: Mapping[str, str] = field(default_factory=dict)
    """More keys: Hugging Face's to GGUF's."""
    yarn: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its scaling by YaRN that the metadata has no words for."""

    @property
    def is_mixture(self) -> bool:
        return "expert_count" in self.scalars.values()

    def tensor(self, name: str) -> str:
        """GGUF's name of the tensor that Hugging Face calls `name`."""
        stem, _, kind = name.rpartition(".")
        if kind == "sinks":
            stem, kind = stem.replace("self_attn", "self_attn.sinks"), "weight"
        if stem in _MODEL:
            return f"{_MODEL[stem]}.{kind}"
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{self.layer[rest]}.{kind}"


GGUF_FAMILIES = {
    # Mistral's files say llama too.
    "llama": GgufFamily("LlamaForCausalLM", rotates_neighbours=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _LAYER | _NORMS_AFTER),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        rotates_neighbours=True,
        scalars={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        _LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        scalars={"original_max_position_embeddings": "rope.scaling.original_context_length"},
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        _LAYER | _EXPERTS,
        defaults={"norm_topk_prob": True},
        scalars={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "norm_topk_prob": "expert_weights_norm",
        },
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        _LAYER | _EXPERTS | {"self_attn.sinks": "attn_sinks", "post_attention_layernorm": "post_attention_norm"},
        scalars={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        yarn={"truncate": False},
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        _LAYER | _NORMS_AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1.0,
        defaults={"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "hidden_act": None},
        scalars={"rope_local_base_freq": "rope.freq_base_swa"},
    ),
}

_SCALARS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}


def find_family(header: GgufHeader) -> GgufFamily:
    """The family that `general.architecture` names.

    Raises:
        CheckpointError: it names none that this package runs.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES or GGUF_FAMILIES[name].architecture not in FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise CheckpointError(f"{header.file}: general.architecture = {printable(name)}: none of {known}")
    return GGUF_FAMILIES[name]


def hugging_face_config(header: GgufHeader) -> dict[str, Any]:
    """What `config.json` says of the same model.

    Raises:
        CheckpointError: as `find_family`; experts, or a rotary scaling that this package does not know.
    """
    family = find_family(header)
    kind = header.metadata["general.architecture"]
    if not family.is_mixture and _scalar(header, f"{kind}.expert_count"):
        raise CheckpointError(f"{header.file}: {kind}.expert_count: mixtures of experts are not supported of {kind}")
    values: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.defaults}
    for key, name in {**_SCALARS, **family.scalars}.items():
        value = _scalar(header, f"{kind}.{name}")
        if value is not None and (key, value) != ("sliding_window", 0):
            values[key] = value
    heads, hidden = (_integer(header, f"{kind}.{name}") for name in ("attention.head_count", "embedding_length"))
    head_dim = values["head_dim"] = _integer(header, f"{kind}.attention.key_length", default=hidden // heads)
    if _integer(header, f"{kind}.attention.value_length", default=head_dim) != head_dim:
        raise CheckpointError(f"{header.file}: {kind}.attention.value_length differs from key_length = {head_dim}")
    rotated = _integer(header, f"{kind}.rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        if family.rotates_neighbours:
            raise CheckpointError(f"{header.file}: {kind}.rope.dimension_count = {rotated}: a part of head_dim = "
                                  f"{head_dim} is not supported for {kind}")  # fmt: skip
        values["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # readers take the integer below
    if kind == "llama" and "sliding_window" in values:
        values["architectures"] = ["MistralForCausalLM"]

    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(f"{header.file}: tensor token_embd.weight is missing")
    values["vocab_size"] = embeddings.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")):
        values[key] = f"blk.0.{tensor}" in header.tensors
    values["rope_scaling"] = _rope_scaling(header, kind, rotated, values)
    if kind == "gemma3":
        # Only the largest model (62 layers) scales its scores by another size than head_dim.
        largest = values.get("num_hidden_layers") == 62
        values["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    return values | _special_tokens(header)


def _special_tokens(header: GgufHeader) -> dict[str, Any]:
    """`bos_token_id`, and as `eos_token_id` the tokens that end a text, as far as they are named or known by text."""
    names = ("bos", "eos", "eot", "eom", *FILL_IN_ENDS)
    said = {name: _scalar(header, f"tokenizer.ggml.{name}_token_id") for name in names}
    said = {name: token for name, token in said.items() if token is not None}
    named = [said[name] for name in ("eos", "eot", "eom") if name in said]
    return {"bos_token_id": said.get("bos"), "eos_token_id": list(end_tokens(end_texts(header), named, said)) or None}


def _rope_scaling(header: GgufHeader, kind: str, rotated: int, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""

    def said(name: str) -> Any:
        return _scalar(header, f"{kind}.rope.scaling.{name}")

    if ROPE_FREQUENCIES in header.tensors:
        return _llama3_scaling(header, rotated, values)
    if all(name in header.tensors for name in LONG_ROPE.values()):
        factors = {key: _float32(header, name) for key, name in LONG_ROPE.items()}
        original = said("original_context_length")
        scaling = {"rope_type": "longrope", "attention_factor": said("attn_factor")}
        return scaling | {"original_max_position_embeddings": original} | {k: v.tolist() for k, v in factors.items()}
    scaling = said("type")
    if scaling in (None, "none"):
        return {"rope_type": "default"} if kind == "gpt-oss" else None  # without one, that of the family's files
    if scaling == "linear":
        return {"rope_type": "linear", "factor": said("factor")}
    if scaling == "yarn":
        context = said("original_context_length")
        scaling = {"rope_type": "yarn", "factor": said("factor"), "original_max_position_embeddings": context}
        return scaling | dict(find_family(header).yarn)
    raise CheckpointError(
        f"{header.file}: {kind}.rope.scaling.type = {shown(scaling)}: only linear and yarn are supported"
    )


def _llama3_scaling(header: GgufHeader, rotated: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3's scaling from the divisors that the file has in their place.

    Every Llama of this scaling has 1, 4 and 8192; the factor is the largest divisor. Others are refused.
    """
    divisors = _float32(header, ROPE_FREQUENCIES)
    factor = float(divisors.max(initial=1))
    theta = Fields(header.file, values).number("rope_theta", 10000.0, *THETA)
    if divisors.shape != (rotated // 2,) or not np.all((divisors > 0) & (divisors < _MAX_DIVISOR)):
        matches = False
    else:
        rope = Rope(rotated, theta, Llama3(factor, 1.0, 4.0, 8192))
        expected = Rope(rotated, theta).inverse_frequencies() / rope.inverse_frequencies()
        matches = np.allclose(divisors, expected, rtol=1e-4, atol=0)
    if not matches:
        raise CheckpointError(f"{header.file}: tensor {ROPE_FREQUENCIES} is not Llama 3's scaling of {rotated} "
                              f"dimensions by {factor:g}")  # fmt: skip
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _float32(header: GgufHeader, name: str) -> np.ndarray:
    tensor = header.tensors[name]
    if tensor.encoding != "F32":
        raise CheckpointError(f"{header.file}: tensor {name} has encoding {tensor.encoding}, expected F32")
    return tensor.data.view(np.float32)


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A positive integer; `default` where there is none."""
    value = _scalar(header, key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise CheckpointError(f"{header.file}: {key} = {shown(value)}: a positive integer below 2^31 is expected")
    return value


def _scalar(header: GgufHeader, key: str) -> Any:
    """A number or a string; of an array with a number for each layer, the one that all of them have."""
    value = header.metadata.get(key)
    if isinstance(value, Strings):
        raise CheckpointError(f"{header.file}: {key} is an array of {value.count} strings, one value is expected")
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 0 or not np.all(value == value[0]):
        raise CheckpointError(f"{header.file}: {key} differs from layer to layer, which is not supported")
    return value[0].item()
