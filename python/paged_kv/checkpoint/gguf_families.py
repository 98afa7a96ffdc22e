"""Translates the metadata of a GGUF file to the keys of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from paged_kv.arguments import printable
from paged_kv.checkpoint.end_tokens import FILL_IN_ENDS, end_tokens
from paged_kv.checkpoint.gguf_header import GgufHeader, GgufTensor
from paged_kv.checkpoint.gguf_keys import OF_WINDOWED_LAYERS, WINDOWS, Metadata
from paged_kv.checkpoint.gguf_latent import LATENT, latent_sizes, split_heads
from paged_kv.checkpoint.gguf_rope import read_scaling, rope_tensors
from paged_kv.checkpoint.gguf_tokenizer import default_ids, end_texts
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models import FAMILIES
from paged_kv.graphs.models.family import Gguf
from paged_kv.graphs.models.fields import MAX_LAYERS

GGUF_FAMILIES: dict[str, Gguf] = {}
"""By `general.architecture`."""
_ARCHITECTURES: dict[str, str] = {}
"""Hugging Face's name of each."""
for _family in FAMILIES.values():
    for _gguf in (*((_family.gguf,) if _family.gguf else ()), *_family.more_gguf):
        GGUF_FAMILIES[_gguf.name], _ARCHITECTURES[_gguf.name] = _gguf, _family.architecture

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_OF_LAYERS = ("num_key_value_heads", "intermediate_size")
"""Sizes that differ between the layers of families with recurrent layers or narrow heads."""
_BY_TENSORS = {
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "use_expert_bias": "exp_probs_b.bias",
}
"""Keys of config.json that are true where a layer has a tensor: in hybrid models the first one does not attend."""


def find_family(header: GgufHeader) -> Gguf:
    """The family that `general.architecture` names.

    Raises:
        CheckpointError: it names none that this package runs.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        names = ", ".join(GGUF_FAMILIES)
        raise CheckpointError(f"{header.file}: general.architecture: expected one of {names}, got {printable(name)}")
    return GGUF_FAMILIES[name]


def scaling_tensors(header: GgufHeader) -> tuple[str, ...]:
    """The file's tensors that are a part of its rotary scaling, and so of `hugging_face_config`."""
    family = find_family(header)
    metadata = Metadata(header, family.name, _used(family))
    return rope_tensors(metadata, family.rope_tensors)


def latent_tensors(header: GgufHeader, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The two tensors that newer files have in place of a layer's `attn_kv_b`, as `gguf_latent.split_heads`."""
    family = find_family(header)
    return split_heads(Metadata(header, family.name, _used(family)), tensor)


def hugging_face_config(header: GgufHeader) -> dict[str, Any]:
    """The `config.json` of the same model. Every key of the metadata is used, or known to have no effect.

    Raises:
        CheckpointError: as `find_family`; a key would change the results that this package does not compute
            (`gguf_keys`), is missing or of a wrong value.
    """
    family = find_family(header)
    metadata = Metadata(header, family.name, _used(family))
    values: dict[str, Any] = {"architectures": [_ARCHITECTURES[family.name]], "hidden_act": "silu", **family.defaults}
    values |= _named_keys(metadata, family)
    values |= _drafting_layers(metadata, family)
    latent = latent_sizes(metadata) if family.latent else {}
    heads = _HeadSizes.of_latent(latent) if latent else _HeadSizes.of(metadata, family)
    values |= latent or heads.keys
    windowed = _windowed_layers(metadata, family)
    values |= _windows(metadata, family, windowed)
    values |= _experts(metadata, family)
    values |= _recurrence(metadata, family, values)
    if family.narrow_heads:
        heads = heads.narrowed(metadata)
        values |= _narrow_heads(metadata, windowed, heads)
    values |= _shown_by_tensors(header)
    values |= _rotation(metadata, family, heads, windowed)
    values |= family.finish(values, metadata.number)
    ineffective = frozenset() if any(windowed) else OF_WINDOWED_LAYERS
    metadata.check(_neutral(metadata, family, heads, values), without_effect=family.without_effect | ineffective)
    return values | _special_tokens(header)


class _HeadSizes(NamedTuple):
    """Dimensions of a head, and those of them that are rotated; the same in layers with a window."""

    dim: int
    rotated: int
    windowed_dim: int
    windowed_rotated: int

    @classmethod
    def of(cls, metadata: Metadata, family: Gguf) -> _HeadSizes:
        default = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
        dim = metadata.integer("attention.key_length", default=default)
        if metadata.integer("attention.value_length", default=default) != dim:
            raise metadata.error("attention.value_length", f"expected attention.key_length = {dim}")
        rotated = metadata.integer("rope.dimension_count", default=dim)
        if rotated != dim and not family.rotates_a_part:
            raise metadata.error("rope.dimension_count", f"expected head_dim = {dim} for {metadata.prefix}")
        if rotated > dim or (rotated != dim and rotated % 2):
            raise metadata.error("rope.dimension_count", f"expected an even number up to head_dim = {dim}")
        return cls(dim, rotated, dim, rotated)

    @classmethod
    def of_latent(cls, sizes: Mapping[str, int]) -> _HeadSizes:
        dim, rotated = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], sizes["qk_rope_head_dim"]
        return cls(dim, rotated, dim, rotated)

    @property
    def keys(self) -> dict[str, Any]:
        part = {} if self.rotated == self.dim else {"partial_rotary_factor": (self.rotated + 0.5) / self.dim}
        return {"head_dim": self.dim, **part}  # readers of the factor take the integer below

    def narrowed(self, metadata: Metadata) -> _HeadSizes:
        """The heads of a family whose layers with a window have heads of their own."""
        dim = metadata.integer("attention.key_length_swa", default=self.dim)
        if metadata.integer("attention.value_length_swa", default=self.dim) != dim:
            raise metadata.error("attention.value_length_swa", f"expected attention.key_length_swa = {dim}")
        return self._replace(windowed_dim=dim, windowed_rotated=dim)


def _named_keys(metadata: Metadata, family: Gguf) -> dict[str, Any]:
    """The keys that have a name in the metadata and one in config.json, and the same value."""
    values: dict[str, Any] = {}
    has_other_layers = family.recurrent is not None or family.narrow_heads
    for key, name in {**_SIZES, **family.sizes}.items():
        if not (has_other_layers and key in _OF_LAYERS) and metadata.scalar(name) is not None:
            values[key] = metadata.integer(name)
    key, name = family.eps
    if metadata.scalar(name) is not None:
        values[key] = metadata.number(name, 0.0)
    for key, name in family.multipliers.items():
        values[key] = metadata.number(name, 1.0) or 1.0
    for key, name in family.counts.items():
        values[key] = metadata.integer(name, 0, least=0)
    for key, name in family.flags.items():
        values[key] = metadata.boolean(name)
    for key, name in family.switches.items():
        values[key] = metadata.scalar(name) is None or metadata.boolean(name)
    return values


def _drafting_layers(metadata: Metadata, family: Gguf) -> dict[str, Any]:
    """The layers of the text, and the last ones, which draft tokens."""
    if family.drafts is None:
        return {}
    count, drafts = metadata.integer("block_count"), metadata.integer(family.drafts, 0, least=0)
    if drafts >= count:
        raise metadata.error(family.drafts, f"expected fewer than block_count = {count}")
    return {"num_hidden_layers": count - drafts, "num_nextn_predict_layers": drafts}


def _windows(metadata: Metadata, family: Gguf, windowed: list[bool]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if any(windowed):
        values["sliding_window"] = metadata.integer("attention.sliding_window")
        values["architectures"] = [family.windowed or _ARCHITECTURES[family.name]]
    if family.windows is not None:
        layers = windowed or [False] * metadata.integer("block_count")
        values["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in layers]
    return values


def _experts(metadata: Metadata, family: Gguf) -> dict[str, Any]:
    if family.mixture is None or not metadata.scalar("expert_count"):
        return {}
    return {
        "architectures": [family.mixture],
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _recurrence(metadata: Metadata, family: Gguf, values: Mapping[str, Any]) -> dict[str, Any]:
    if family.recurrent is None:
        return {}
    return {
        "layer_types": _recurrent_layers(metadata, family)[: values.get("num_hidden_layers", 0)],
        **{key: _of_some_layers(metadata, _SIZES[key]) for key in _OF_LAYERS},
    }


def _narrow_heads(metadata: Metadata, windowed: list[bool], heads: _HeadSizes) -> dict[str, Any]:
    """The heads of layers with a window and of the others."""
    full = next((layer for layer, has_window in enumerate(windowed) if not has_window), 0)
    return {
        **_kv_heads(metadata, windowed),
        "full_head_dim": heads.dim,
        "head_dim": heads.windowed_dim,
        **_widened_layers(metadata),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in metadata.header.tensors,
    }


def _shown_by_tensors(header: GgufHeader) -> dict[str, Any]:
    """The keys that show in which tensors the file has."""
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(f"{header.file}: tensor token_embd.weight is missing")
    in_layers = {name.partition(".")[2].partition(".")[2] for name in header.tensors if name.startswith("blk.")}
    return {
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{key: tensor in in_layers for key, tensor in _BY_TENSORS.items()},
        "use_parallel_residual": "ffn_norm.weight" not in in_layers,
    }


def _rotation(metadata: Metadata, family: Gguf, heads: _HeadSizes, windowed: list[bool]) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", 10000.0)
    scaling = read_scaling(metadata, scaling_tensors(metadata.header), heads.rotated, theta)
    if not family.has_window_rope or not (any(windowed) or family.windowed is None):
        return {"rope_theta": theta, "rope_scaling": scaling}
    local = metadata.number("rope.freq_base_swa", theta if family.window_theta is None else family.window_theta)
    return {
        "rope_theta": theta,
        "rope_parameters": {
            "full_attention": (scaling or {"rope_type": "default"}) | {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _neutral(
    metadata: Metadata, family: Gguf, heads: _HeadSizes, values: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """The values without effect of keys whose effect depends on the rest of the file."""
    scale = values.get("query_pre_attn_scalar", heads.dim) ** -0.5
    unread = {"rope.freq_base_swa": (values["rope_theta"],), "attention.scale": (0, scale)}
    same = {
        "attention.key_length_swa": (heads.windowed_dim,),
        "attention.value_length_swa": (heads.windowed_dim,),
        "embedding_length_out": (0, metadata.integer("embedding_length")),
        "rope.dimension_count_swa": (heads.windowed_rotated,),
        "tensor_data_layout": ("Meta AI original pth" if family.rotates_neighbours else "reference",),
        "vocab_size": (values["vocab_size"],),
        **{name: allowed for name, allowed in unread.items() if name not in _used(family)},
    }
    if family.mixture is not None and not metadata.scalar("expert_count"):
        same["expert_used_count"] = (0,)
    return {**same, **family.neutral}


def _used(family: Gguf) -> frozenset[str]:
    """The metadata's keys that a family reads, beside those of all."""
    used = family.reads.union(family.sizes.values(), family.multipliers.values(), family.eps[1:])
    used |= {*family.counts.values(), *family.flags.values(), *family.switches.values()}
    used |= {*(() if family.drafts is None else (family.drafts,))}
    used |= frozenset() if family.windows is None else WINDOWS
    used |= frozenset() if family.recurrent is None else {"attention.recurrent_layers", "full_attention_interval"}
    used |= frozenset() if family.mixture is None else {"expert_count", "expert_used_count"}
    lengths = {"attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"}
    used |= lengths if family.narrow_heads else set()
    used |= LATENT if family.latent else set()
    return used | ({"rope.freq_base_swa"} if family.has_window_rope else set())


def _windowed_layers(metadata: Metadata, family: Gguf) -> list[bool]:
    """Tell for each layer if it has a window; empty where the family has none, or the file names none."""
    if family.windows is None:
        return []
    layers = metadata.integer("block_count", most=MAX_LAYERS)
    if not family.needs_window and not metadata.scalar("attention.sliding_window"):
        return []
    name = "attention.sliding_window_pattern"
    pattern, period = metadata.get(name), family.windows
    if isinstance(pattern, np.ndarray):
        if pattern.size != layers or pattern.dtype.kind not in "biu":
            raise metadata.error(name, f"expected a number, or as many as block_count = {layers}")
        return [bool(is_narrow) for is_narrow in pattern]
    if pattern is not None:
        if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
            raise metadata.error(name, f"expected a number, or as many as block_count = {layers}")
        period = pattern
    return [period == 0 or index % period < period - 1 for index in range(layers)]


def _recurrent_layers(metadata: Metadata, family: Gguf) -> list[str]:
    """The type of each layer, those that draft tokens included."""
    layers, name = metadata.integer("block_count", most=MAX_LAYERS), "attention.recurrent_layers"
    recurrent, of_layers = metadata.get(name), metadata.get("attention.head_count_kv")
    if recurrent is None and isinstance(of_layers, np.ndarray):
        name, recurrent = "attention.head_count_kv", of_layers == 0
    elif recurrent is None:
        interval = metadata.integer("full_attention_interval", 4)
        recurrent = np.arange(1, layers + 1) % interval != 0
    if not isinstance(recurrent, np.ndarray) or recurrent.size != layers or recurrent.dtype.kind not in "biu":
        raise metadata.error(name, f"expected a list of block_count = {layers} entries")
    types = [family.recurrent or "" if is_recurrent else "full_attention" for is_recurrent in recurrent]
    inner = metadata.get("feed_forward_length")
    if family.mlp_or_mixer and isinstance(inner, np.ndarray) and inner.size == layers:
        types = ["mlp" if width else kind for width, kind in zip(inner, types, strict=True)]
    return types


def _of_some_layers(metadata: Metadata, name: str) -> int | None:
    """A number of the layers where it is not 0; None where the file does not say."""
    value = metadata.get(name)
    if isinstance(value, np.ndarray):
        counts = set(value.tolist()) - {0}
        if len(counts) > 1:
            raise metadata.error(name, "expected one number and 0")
        return int(counts.pop()) if counts else None
    return None if value is None else metadata.integer(name)


def _kv_heads(metadata: Metadata, windowed: list[bool]) -> dict[str, Any]:
    """The KV heads of layers with a window and of the others."""
    name = "attention.head_count_kv"
    of_layers = metadata.get(name)
    if not isinstance(of_layers, np.ndarray):
        heads = metadata.integer(name)
        return {"num_key_value_heads": heads, "full_kv_heads": heads}
    values = {}
    for key, kind in (("num_key_value_heads", True), ("full_kv_heads", False)):
        counts = {int(count) for count, has_window in zip(of_layers, windowed, strict=False) if has_window == kind}
        if len(of_layers) != len(windowed) or len(counts) > 1:
            layers = f"layers {'with' if kind else 'without'} a window (attention.sliding_window_pattern)"
            raise metadata.error(name, f"expected one number for all {layers}")
        values[key] = counts.pop() if counts else int(of_layers[0])
    return values


def _widened_layers(metadata: Metadata) -> dict[str, Any]:
    """The inner dimension of MLPs, and whether it is twice that in the layers that share K and V."""
    layers, name = metadata.integer("block_count", most=MAX_LAYERS), "feed_forward_length"
    shared = metadata.integer("attention.shared_kv_layers", 0, least=0)
    widths = metadata.get(name)
    if not isinstance(widths, np.ndarray):
        return {"intermediate_size": metadata.integer(name), "num_kv_shared_layers": shared}
    inner, own = int(widths[0]) if widths.size else 0, layers - shared
    usual, wide = [inner] * layers, [inner * (1 if layer < own else 2) for layer in range(layers)]
    if widths.tolist() not in (usual, wide):
        raise metadata.error(name, f"expected the same in all layers, or twice as much in the last {shared}")
    is_wide = widths.tolist() != usual
    return {"intermediate_size": inner, "num_kv_shared_layers": shared, "use_double_wide_mlp": is_wide}


def _special_tokens(header: GgufHeader) -> dict[str, Any]:
    """`bos_token_id`, and as `eos_token_id` the tokens that end a text, as far as they are named or known by text."""
    names = ("bos", "eos", "eot", "eom", *FILL_IN_ENDS)
    metadata = Metadata(header, "tokenizer.ggml", [f"{name}_token_id" for name in names])
    ids = {name: metadata.scalar(f"{name}_token_id") for name in names}
    ids = {name: token for name, token in ids.items() if token is not None}
    ids = {key.removesuffix("_token_id"): token for key, token in default_ids(header).items()} | ids
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    return {"bos_token_id": ids.get("bos"), "eos_token_id": list(end_tokens(end_texts(header), named, ids)) or None}
