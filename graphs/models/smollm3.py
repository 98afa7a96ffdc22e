"""SmolLM3: Llama with layers, every fourth one, that do not rotate q and k."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias, rotates = fields.boolean("attention_bias"), _rotates(fields)
    has_windows = fields.boolean("use_sliding_window")
    return read_config(
        fields.with_defaults(tie_word_embeddings=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias"),
        rotates=rotates,
        windows=read_windows(fields, [not rotated for rotated in rotates]) if has_windows else (),
    )


def _rotates(fields: Fields) -> tuple[bool, ...]:
    """Tell for each layer if it rotates: `no_rope_layers` has 1 for one that does."""
    layers, said = fields.layers(), fields.get("no_rope_layers")
    if said is None:
        interval = fields.integer("no_rope_layer_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    known = isinstance(said, list) and all(type(each) is int and each in (0, 1) for each in said)
    if not known or len(said) != layers:
        raise fields.error("no_rope_layers", f"a list of num_hidden_layers = {layers} numbers 0 and 1 is expected")
    return tuple(each == 1 for each in said)


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    read=read,
    gguf=Gguf("smollm3", rotates_neighbours=True),
)
