"""A family of models by its differences: its names, how its `config.json` is read, and what GGUF calls its parts.

Each family has a module here that defines `FAMILY`; `__init__.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields

LAYER = {
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
"""Names of a layer's tensors: Hugging Face's to GGUF's."""
EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
MAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
SSM_SIZES = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "ssm_inner_size": "ssm.inner_size",
}
"""Sizes of Mamba-2: Hugging Face's keys to GGUF's."""
NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_WITHOUT_KIND = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
}
"""GGUF's names of the parameters of layers that are no weight or bias: those of recurrences, Gemma 4's scales."""
_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.enorm": "nextn_enorm",
    "model.hnorm": "nextn_hnorm",
    "model.eh_proj": "nextn_eh_proj",
}

RMS_NORM_EPS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
LAYER_NORM_EPS = ("layer_norm_eps", "attention.layer_norm_epsilon")
"""The epsilon of norms: Hugging Face's key and GGUF's."""

FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies: Llama 3's scaling, already applied to each pair of dimensions."""
LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LLAMA_ROPE = (FREQUENCIES, *LONG_ROPE.values())

Number = Callable[[str, float], float]
"""A number of a GGUF file's metadata by its key, or the default where the file has none."""


def _nothing(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    del values, number
    return {}


@dataclass(frozen=True)
class Gguf:
    """An architecture of GGUF, by its differences from the others. Keys of its metadata are without their prefix."""

    name: str
    """In `general.architecture`, and the prefix of its keys."""
    _: KW_ONLY
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Names of a layer's tensors: Hugging Face's to GGUF's; and those of others that differ."""
    eps: tuple[str, str] = RMS_NORM_EPS
    """Keys of the epsilon of its norms."""
    rotates_neighbours: bool = False
    """Rotation pairs elements 2i and 2i + 1: the converter reordered the rows of q and k, and loading restores them."""
    norm_offset: float = 0.0
    """The number that the converter has added to the weights of all norms."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata has no words for."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """More keys, of positive integers: Hugging Face's to GGUF's."""
    multipliers: Mapping[str, str] = field(default_factory=dict)
    """More keys, of numbers that are 1 where they are missing or 0: Hugging Face's to GGUF's."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """More keys, of integers that are 0 where they are missing: Hugging Face's to GGUF's."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """More keys, of booleans that are false where they are missing: Hugging Face's to GGUF's."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """More keys, of booleans that are true where they are missing: Hugging Face's to GGUF's."""
    finish: Callable[[Mapping[str, Any], Number], Mapping[str, Any]] = _nothing
    """More keys of config.json, from those that were read; it asks for numbers of the metadata."""
    reads: frozenset[str] = frozenset()
    """Keys of the metadata that `finish` asks for."""
    drafts: str | None = None
    """Key of the number of last layers that draft tokens (multi-token prediction); their tensors are not read."""
    windows: int | None = None
    """Which layers have a window where the file has no pattern: every layer except each n-th; 0: every layer. None: the
    architecture has no windows."""
    needs_window: bool = False
    """A file without `attention.sliding_window` is refused; elsewhere it has no windows."""
    mixture: str | None = None
    """Hugging Face's name of the architecture where there are experts, if it is another one."""
    windowed: str | None = None
    """Hugging Face's name of the architecture where layers have windows, if it is another one."""
    recurrent: str | None = None
    """Hugging Face's name of recurrent layers in `layer_types`. The file tells which they are: by a list, by how many
    lie between two that attend, or by KV heads, of which they have none. None: the architecture has no such layers."""
    mlp_or_mixer: bool = False
    """Each layer is either an MLP or a mixer, never both; the MLPs are the layers with an inner dimension."""
    narrow_heads: bool = False
    """Layers with a window have a head_dim and KV heads of their own; `finish` gets them as `head_dim` and
    `num_key_value_heads`, those of the others as `full_head_dim` and `full_kv_heads`."""
    has_window_rope: bool = False
    """Layers with a window have a rotation of their own."""
    window_theta: float | None = None
    """Its base where the file has none; that of the other layers where it is None."""
    latent: bool = False
    """Attention is latent (MLA); the file has its sizes in one of two layouts."""
    rotates_a_part: bool = False
    """Rotation may cover only a part of each head."""
    rope_tensors: tuple[str, ...] = ()
    """The tensors of `LLAMA_ROPE` that the file may have."""
    without_effect: frozenset[str] = frozenset()
    """Keys of the metadata that its models ignore."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values without effect of keys that have none, whatever their values, elsewhere."""

    def tensor(self, name: str) -> str:
        """GGUF's name of the tensor that Hugging Face calls `name`."""
        stem, _, kind = name.rpartition(".")
        if kind == "sinks":
            stem, kind = stem.replace("self_attn", "self_attn.sinks"), "weight"
        if kind == "e_score_correction_bias":
            stem, kind = f"{stem}.e_score_correction", "bias"
        if kind in _WITHOUT_KIND:
            return f"blk.{stem.removeprefix('model.layers.').partition('.')[0]}.{_WITHOUT_KIND[kind]}"
        if stem in _MODEL:
            return f"{self.layer.get(stem, _MODEL[stem])}.{kind}"
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{self.layer[rest]}.{kind}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family."""

    architecture: str
    """Its name in `architectures` of config.json."""
    model_type: str
    """Its name in `model_type`."""
    read: Callable[[Fields], DecoderConfig]
    """The model that a `config.json` describes; raises `CheckpointError` for what would be computed wrongly."""
    missing: Mapping[str, Any] = field(default_factory=dict)
    """The values, as in transformers, of keys that a config.json lacks; where it has null, `read` has its own."""
    gguf: Gguf | None = None
    """None: its models in GGUF files are not read, or call themselves another family's."""
    more_gguf: tuple[Gguf, ...] = ()
    """Other names of its architecture in GGUF files."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Parts of the names of tensors that its checkpoints have otherwise than the step: theirs, and the step's."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that text does not need."""
    engine_only: bool = False
    """MAX Serve does not run it: its pages hold latents, MAX has the model with its images, its texts end before the
    context that config.json says (Llama 4), or it was not tried there (Phi-3.5-MoE)."""

    def config_of(self, fields: Fields) -> DecoderConfig:
        """The model that a `config.json` describes.

        Raises:
            CheckpointError: a field is missing, of a wrong type, or says what would be computed wrongly.
        """
        config = self.read(fields.with_missing(**self.missing))
        rotates_a_part = any(each.rotates_a_part for each in (self.gguf, *self.more_gguf) if each is not None)
        if not rotates_a_part and config.latent is None and not self.unread:
            head_dims = {config.heads_of(layer)[1] for layer in range(config.num_hidden_layers)}
            if any(rope is not None and rope.dims not in head_dims for rope in (config.rope, config.local_rope)):
                raise fields.error("partial_rotary_factor", f"expected 1: {self.architecture} rotates whole heads")
        return config
