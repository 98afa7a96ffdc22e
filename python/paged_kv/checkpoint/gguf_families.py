"""GGUF's terms in Hugging Face's: what a file's metadata is as a `config.json`, and what its tensors are called.

llama.cpp's converter writes GGUF files, and changes a few weights on the way; what is undone here is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_kv.arguments import printable
from paged_kv.checkpoint.end_tokens import FILL_IN_ENDS, end_tokens
from paged_kv.checkpoint.gguf_header import GgufHeader
from paged_kv.checkpoint.gguf_keys import OF_WINDOWED_LAYERS, WINDOWS, Metadata
from paged_kv.checkpoint.gguf_rope import FREQUENCIES, LONG_ROPE, read_scaling, rope_tensors
from paged_kv.checkpoint.gguf_tokenizer import end_texts
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models import FAMILIES
from paged_kv.graphs.models.fields import MAX_LAYERS

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


@dataclass(frozen=True)
class GgufFamily:
    """One of GGUF's architectures, by its differences from the others."""

    architecture: str
    """Hugging Face's name."""
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """Names of a layer's tensors: Hugging Face's to GGUF's."""
    rotates_neighbours: bool = False
    """Rotation turns elements 2i and 2i + 1: the rows of q and k were reordered for it, and are put back."""
    norm_offset: float = 0.0
    """The number that the converter has added to the weights of all norms."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata has no words for."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """More keys, of positive integers: Hugging Face's to GGUF's."""
    multipliers: Mapping[str, str] = field(default_factory=dict)
    """More keys, of numbers that are 1 where they are missing or 0: Hugging Face's to GGUF's."""
    windows: int | None = None
    """The layers with a window where the file has no pattern: all but each so many-th, or all where it is 0. None: the
    architecture has no windows."""
    windowed: str | None = None
    """Hugging Face's name of the architecture where layers have windows, if it is another one."""
    rotates_windows_apart: bool = False
    """Layers with a window have a rotation of their own."""
    rotates_a_part: bool = False
    """A part of each head may be rotated."""
    rope_tensors: tuple[str, ...] = ()
    """The tensors of `gguf_rope.ROPE_TENSORS` that the file may have."""
    without_effect: frozenset[str] = frozenset()
    """Keys of the metadata that its files have, and its models make nothing of."""
    yarn: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its scaling by YaRN that the metadata has no words for."""

    @property
    def uses(self) -> frozenset[str]:
        """The metadata's keys that it reads, beside those of all families."""
        uses = {*self.sizes.values(), *self.multipliers.values()} | (set() if self.windows is None else WINDOWS)
        return frozenset(uses | ({"rope.freq_base_swa"} if self.rotates_windows_apart else set()))

    def tensor(self, name: str) -> str:
        """GGUF's name of the tensor that Hugging Face calls `name`."""
        stem, _, kind = name.rpartition(".")
        if kind == "sinks":
            stem, kind = stem.replace("self_attn", "self_attn.sinks"), "weight"
        if stem in _MODEL:
            return f"{_MODEL[stem]}.{kind}"
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{self.layer[rest]}.{kind}"


_LLAMA_ROPE = (FREQUENCIES, *LONG_ROPE.values())

_GRANITE_HYBRID = frozenset(
    {f"ssm.{name}" for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")}
    | {"expert_shared_feed_forward_length"}
)
"""Granite 4's dense models are hybrids without recurrent layers and experts."""

GGUF_FAMILIES = {
    # Mistral's files say llama too.
    "llama": GgufFamily(
        "LlamaForCausalLM", rotates_neighbours=True, windows=0, windowed="MistralForCausalLM", rope_tensors=_LLAMA_ROPE
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    # So do OLMo 3's of OLMo 2.
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM", _LAYER | _NORMS_AFTER, windows=4, windowed="Olmo3ForCausalLM", rotates_windows_apart=True
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        rotates_neighbours=True,
        multipliers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        without_effect=_GRANITE_HYBRID,
        rope_tensors=_LLAMA_ROPE,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        _LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        sizes={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        windows=0,
        rotates_a_part=True,
        rope_tensors=tuple(LONG_ROPE.values()),
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        _LAYER | _EXPERTS,
        defaults={"norm_topk_prob": True},
        sizes={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        _LAYER | _EXPERTS | {"self_attn.sinks": "attn_sinks", "post_attention_layernorm": "post_attention_norm"},
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        windows=2,
        yarn={"truncate": False},
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        _LAYER | _NORMS_AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1.0,
        defaults={"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
        windows=6,
        rotates_windows_apart=True,
    ),
}

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
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


def scaling_tensors(header: GgufHeader) -> tuple[str, ...]:
    """The file's tensors that are a part of its rotary scaling, and so of `hugging_face_config`."""
    family = find_family(header)
    metadata = Metadata(header, header.metadata["general.architecture"], family.uses)
    return rope_tensors(metadata, family.rope_tensors)


def hugging_face_config(header: GgufHeader) -> dict[str, Any]:
    """Return what `config.json` says of the same model. Every key of the metadata is used, or known to have no effect.

    Raises:
        CheckpointError: as `find_family`; a key would change the results that this package does not compute
            (`gguf_keys`), is missing or of a wrong value.
    """
    family = find_family(header)
    metadata = Metadata(header, header.metadata["general.architecture"], family.uses)
    values: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.defaults}
    for key, name in {**_SIZES, **family.sizes}.items():
        if metadata.scalar(name) is not None:
            values[key] = metadata.integer(name)
    if metadata.scalar("attention.layer_norm_rms_epsilon") is not None:
        values["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon", 0.0)
    for key, name in family.multipliers.items():
        values[key] = metadata.number(name, 1.0) or 1.0
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = values["head_dim"] = metadata.integer("attention.key_length", default=hidden // heads)
    if metadata.integer("attention.value_length", default=hidden // heads) != head_dim:
        raise metadata.error("attention.value_length", f"differs from attention.key_length = {head_dim}")
    rotated = metadata.integer("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        if not family.rotates_a_part:
            problem = f"a part of head_dim = {head_dim} is not supported for {metadata.prefix}"
            raise metadata.error("rope.dimension_count", problem)
        if rotated > head_dim or rotated % 2:
            raise metadata.error("rope.dimension_count", f"an even number up to head_dim = {head_dim} is expected")
        values["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # readers take the integer below

    narrow = _windowed_layers(metadata, family)
    if any(narrow):
        values["sliding_window"] = metadata.integer("attention.sliding_window")
        values["architectures"] = [family.windowed or family.architecture]
    if family.windows is not None:
        narrow = narrow or [False] * metadata.integer("block_count")
        values["layer_types"] = ["sliding_attention" if is_narrow else "full_attention" for is_narrow in narrow]

    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(f"{header.file}: tensor token_embd.weight is missing")
    values["vocab_size"] = embeddings.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")):
        values[key] = f"blk.0.{tensor}" in header.tensors

    theta = values["rope_theta"] = metadata.number("rope.freq_base", 10000.0)
    scaling = read_scaling(metadata, scaling_tensors(header), rotated, theta)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = scaling | dict(family.yarn)
    if scaling is None and metadata.prefix == "gpt-oss":
        scaling = {"rope_type": "default"}  # without one, that of the family's files
    if family.rotates_windows_apart and (any(narrow) or family.windowed is None):
        local = metadata.number("rope.freq_base_swa", 10000.0 if metadata.prefix == "gemma3" else theta)
        values["rope_parameters"] = {
            "full_attention": (scaling or {"rope_type": "default"}) | {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    else:
        values["rope_scaling"] = scaling

    scored = head_dim
    if metadata.prefix == "gemma3":
        # Only the largest model (62 layers) scales its scores by another size than head_dim.
        scored = hidden // heads if values.get("num_hidden_layers") == 62 else head_dim
        values["query_pre_attn_scalar"] = scored
    if metadata.prefix == "granite":
        values["attention_multiplier"] = metadata.number("attention.scale", 0.0) or scored**-0.5
        values["logits_scaling"] = metadata.number("logit_scale", 1.0)
    same = {
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "embedding_length_out": (0, hidden),
        "rope.dimension_count_swa": (rotated,),
        "tensor_data_layout": ("Meta AI original pth" if family.rotates_neighbours else "reference",),
        "vocab_size": (values["vocab_size"],),
    }
    more = {"rope.freq_base_swa": (theta,), "attention.scale": (0, scored**-0.5)}
    same |= {name: allowed for name, allowed in more.items() if name not in family.uses}
    if metadata.prefix == "granite":  # there it says whether q and k are rotated at all
        same["rope.scaling.finetuned"] = (True,)
    metadata.check(same, without_effect=family.without_effect | (frozenset() if any(narrow) else OF_WINDOWED_LAYERS))
    return values | _special_tokens(header)


def _windowed_layers(metadata: Metadata, family: GgufFamily) -> list[bool]:
    """Tell for each layer if it has a window; empty where the family has none, or the file names none."""
    if family.windows is None:
        return []
    layers = metadata.integer("block_count")
    if layers > MAX_LAYERS:
        raise metadata.error("block_count", f"at most {MAX_LAYERS} is supported")
    # llama.cpp has no gpt-oss without a window; elsewhere none, or 0, is no window.
    if metadata.prefix != "gpt-oss" and not metadata.scalar("attention.sliding_window"):
        return []
    name = "attention.sliding_window_pattern"
    pattern, period = metadata.get(name), family.windows
    if isinstance(pattern, np.ndarray):
        if pattern.size != layers or pattern.dtype.kind not in "biu":
            raise metadata.error(name, f"a number, or as many as layers = {layers}, is expected")
        return [bool(is_narrow) for is_narrow in pattern]
    if pattern is not None:
        if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
            raise metadata.error(name, f"a number, or as many as layers = {layers}, is expected")
        period = pattern
    return [period == 0 or index % period < period - 1 for index in range(layers)]


def _special_tokens(header: GgufHeader) -> dict[str, Any]:
    """`bos_token_id`, and as `eos_token_id` the tokens that end a text, as far as they are named or known by text."""
    names = ("bos", "eos", "eot", "eom", *FILL_IN_ENDS)
    metadata = Metadata(header, "tokenizer.ggml", [f"{name}_token_id" for name in names])
    said = {name: metadata.scalar(f"{name}_token_id") for name in names}
    said = {name: token for name, token in said.items() if token is not None}
    named = [said[name] for name in ("eos", "eot", "eom") if name in said]
    return {"bos_token_id": said.get("bos"), "eos_token_id": list(end_tokens(end_texts(header), named, said)) or None}
