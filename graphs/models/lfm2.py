"""LFM2: most layers are gated convolutions over three tokens, the others attend."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.recurrence import Recurrence, read_layer_types


def read(fields: Fields) -> DecoderConfig:
    bias, hidden, layers = fields.boolean("conv_bias"), fields.integer("hidden_size"), fields.layers()
    fields = fields.with_defaults(
        intermediate_size=fields.get("block_ff_dim"),
        tie_word_embeddings=fields.get("tie_embedding"),
        rope_theta=1000000.0,
    )
    attending = fields.get("full_attn_idxs")
    if fields.get("layer_types") is None and attending is not None:
        valid = isinstance(attending, list) and all(type(each) is int and 0 <= each < layers for each in attending)
        if not valid:
            raise fields.error("full_attn_idxs", f"expected a list of layers below num_hidden_layers = {layers}")
        types = ["full_attention" if index in attending else "conv" for index in range(layers)]
        fields = fields.with_defaults(layer_types=types)
    fields = fields.with_defaults(layer_types=["full_attention"] * layers)
    recurrence = Recurrence(
        kind="convolution",
        layers=read_layer_types(fields, ("conv",)),
        channels=hidden,
        kernel=fields.integer("conv_L_cache", default=3, least=2),
        conv_bias=bias,
        bias=bias,
    )
    inner = _inner(fields)
    return read_config(
        fields.with_defaults(tie_word_embeddings=True, num_key_value_heads=8, intermediate_size=inner),
        "norm_eps",
        qk_norm="head",
        recurrence=recurrence if any(recurrence.layers) else None,
        intermediate_size=inner,
    )


def _inner(fields: Fields) -> int:
    """The inner dimension of the MLPs: two thirds of what is said, rounded up, unless that is said to be it."""
    inner = fields.integer("intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return inner
    multiple = fields.integer("block_multiple_of", default=256)
    inner = int(fields.number("block_ffn_dim_multiplier", default=1.0) * int(2 * inner / 3))
    return -(-inner // multiple) * multiple


FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    read=read,
    gguf=Gguf(
        "lfm2",
        layer=LAYER
        | {
            "model.norm": "token_embd_norm",
            "conv.in_proj": "shortconv.in_proj",
            "conv.conv1d": "shortconv.conv",
            "conv.out_proj": "shortconv.out_proj",
        },
        defaults={"block_auto_adjust_ff_dim": False},
        sizes={"conv_L_cache": "shortconv.l_cache"},
        eps=("norm_eps", "attention.layer_norm_rms_epsilon"),
        recurrent="conv",
    ),
    renames={
        ".conv.conv.": ".conv.conv1d.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.",
        ".self_attn.k_layernorm.": ".self_attn.k_norm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        "model.embedding_norm.": "model.norm.",
    },
    engine_only=True,
)
