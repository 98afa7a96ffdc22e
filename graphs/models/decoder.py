"""The decoder of every family: the names of its weights, and its step as a MAX graph that prefills and decodes.

Families differ in the switches of `DecoderConfig` alone. `decode` and `logits` build on values of any graph (the
server has inputs of its own); `build_step` makes the graph that the engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorValue, Weight, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.inputs import graph_inputs, input_types
from paged_kv.graphs.layers import Rotary, StepRows, rms_norm
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.ops import PagedCache, kernels
from paged_kv.graphs.quantised import QuantisedWeight, quantised_linear, quantised_rows, row_bytes
from paged_kv.graphs.rope import Rope

STEP = "decoder_step"

# The norms on the input and on the output of the attention, then of the MLP.
_NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and shape of every weight of the model; linear layers are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    linear = {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, inner)}
    if config.fused_projections:
        linear |= {"self_attn.qkv_proj": (queries + 2 * keys, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
    else:
        linear |= {
            f"self_attn.{name}_proj": (size, hidden) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
        linear |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if _has_bias(config, name)}
    layer |= {f"{name}.weight": (hidden,) for name in _NORMS[config.norm_place] if name is not None}
    if config.qk_norm is not None:
        sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (queries, keys)
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", sizes, strict=True)}

    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _has_bias(config: DecoderConfig, name: str) -> bool:
    if name.startswith("mlp."):
        return config.mlp_bias
    return config.o_bias if name == "self_attn.o_proj" else config.qkv_bias


def cache_shape(config: DecoderConfig, pages: int | str, page_size: int) -> list[int | str]:
    """`[pages, 2, layers, page_size, Hk, D]`: one buffer for the K and V of every layer."""
    return [pages, 2, config.num_hidden_layers, page_size, config.num_key_value_heads, config.head_dim]


@dataclass(frozen=True)
class Parameters:
    """The model's weights as values of a graph, and the layers that take nothing but weights."""

    config: DecoderConfig
    values: Mapping[str, TensorValue]
    """By checkpoint name; those of `config.encodings` are their blocks."""

    @staticmethod
    def of(graph: Graph, config: DecoderConfig, dtype: DType, device: DeviceRef, prefix: str = "") -> Parameters:
        """Adds every weight to `graph`, to be bound under its checkpoint name after `prefix` from the host's memory.

        Those of `config.encodings` are their blocks, the others of `config.computed_in(dtype)`.
        """
        dtype = config.computed_in(dtype)
        quantised = dict(config.encodings)
        values = {}
        for name, shape in expected_tensors(config).items():
            kind, align = dtype, dtype.size_in_bytes  # the loader aligns to the dtype; MAX's default is larger
            if name in quantised:
                kind, align, shape = DType.uint8, 1, (shape[0], row_bytes(quantised[name], shape[1]))
            values[name] = graph.add_weight(Weight(prefix + name, kind, shape, device, align=align))
        return Parameters(config, values)

    def linear(self, x: TensorValue, *names: str) -> list[TensorValue]:
        """`x` `[M, in]` through several linear layers: `[M, out]` each."""
        weights = [self._matrix(f"{name}.weight") for name in names]
        dense = [weight for weight in weights if not isinstance(weight, QuantisedWeight)]
        products = iter(paged.linear_group(x, dense) if dense else [])
        ys = [quantised_linear(x, w) if isinstance(w, QuantisedWeight) else next(products) for w in weights]
        biases = [self.values.get(f"{name}.bias") for name in names]
        return [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]

    def norm(self, name: str, x: TensorValue) -> TensorValue:
        """The RMS norm of the last axis."""
        config = self.config
        weight = self.values[f"{name}.weight"]
        return rms_norm(x, weight, config.rms_norm_eps, offset=config.norm_offset, rounds_once=config.norm_rounds_once)

    def embed(self, tokens: TensorValue) -> TensorValue:
        """Token ids `[T]` -> `[T, hidden]`."""
        weight = self._matrix("model.embed_tokens.weight")
        if isinstance(weight, QuantisedWeight):
            x = quantised_rows(weight, tokens)
        else:
            x = ops.gather(weight, tokens, axis=0)
        return _times(x, self.config.embedding_multiplier)

    def _matrix(self, name: str) -> TensorValue | QuantisedWeight:
        encoding = dict(self.config.encodings).get(name)
        value = self.values[name]
        return value if encoding is None else QuantisedWeight(value, encoding)


def decode(
    parameters: Parameters, tokens: TensorValue, cache: PagedCache, rows: StepRows, wanted: TensorValue | None
) -> TensorValue:
    """The hidden states after all layers, `[N, hidden]`, for the tokens of one step `[T]`; `cache` is changed in place.

    Args:
        wanted: `[N]` int64: the rows that are of use; all of them where it is None.
    """
    config = parameters.config
    ropes = {config.layer_rope(layer) for layer in range(config.num_hidden_layers)}
    rotaries: dict[Rope, Rotary] = {rope: Rotary.of(rows.positions, rope) for rope in sorted(ropes, key=repr)}
    attention_in, attention_out, mlp_in, mlp_out = _NORMS[config.norm_place]
    x = parameters.embed(tokens)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"

        def norm(name: str | None, y: TensorValue, at: str = at) -> TensorValue:
            return y if name is None else parameters.norm(f"{at}.{name}", y)

        # Of the last layer only the wanted rows reach the logits: of the others it has K and V alone.
        of_use = wanted if layer + 1 == config.num_hidden_layers else None
        rotary = rotaries[config.layer_rope(layer)]
        attended = _attention(parameters, norm(attention_in, x), cache, rows, rotary, layer, of_use)
        x = x if of_use is None else ops.gather(x, of_use, axis=0)
        x = x + _times(norm(attention_out, attended), config.residual_multiplier)
        x = x + _times(norm(mlp_out, _mlp(parameters, norm(mlp_in, x), at)), config.residual_multiplier)
    return x


def logits(parameters: Parameters, x: TensorValue) -> TensorValue:
    """The logits `[N, vocab]` float32 of hidden states `[N, hidden]`."""
    config = parameters.config
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    y = parameters.linear(parameters.norm("model.norm", x), head)[0]
    if config.logits_divisor != 1:
        y = y / config.logits_divisor
    return ops.cast(y, DType.float32)


def _attention(
    parameters: Parameters,
    x: TensorValue,
    cache: PagedCache,
    rows: StepRows,
    rotary: Rotary,
    layer: int,
    wanted: TensorValue | None,
) -> TensorValue:
    """The attention of `x` `[T, hidden]` over everything its requests have cached and these tokens themselves.

    Keys enter the cache rotated. Of `[T, hidden]`, only the rows `wanted` `[N]` are computed where it is not None.
    """
    config = parameters.config
    at = f"model.layers.{layer}.self_attn"

    def split_heads(y: TensorValue) -> TensorValue:
        return ops.reshape(y, [y.shape[0], int(y.shape[1]) // config.head_dim, config.head_dim])

    def heads(y: TensorValue, name: str) -> TensorValue:
        if config.qk_norm == "all_heads":
            y = parameters.norm(f"{at}.{name}_norm", y)
        y = split_heads(y)
        return parameters.norm(f"{at}.{name}_norm", y) if config.qk_norm == "head" else y

    batch, lengths, q_rotary = rows.batch, rows.lengths, rotary
    if config.fused_projections:
        keys = config.num_key_value_heads * config.head_dim
        sizes = [config.num_attention_heads * config.head_dim, keys, keys]
        q, k, v = ops.split(parameters.linear(x, f"{at}.qkv_proj")[0], sizes, axis=-1)
        q = q if wanted is None else ops.gather(q, wanted, axis=0)
    elif wanted is None:
        q, k, v = parameters.linear(x, *(f"{at}.{name}_proj" for name in "qkv"))
    else:
        k, v = parameters.linear(x, *(f"{at}.{name}_proj" for name in "kv"))
        q = parameters.linear(ops.gather(x, wanted, axis=0), f"{at}.q_proj")[0]
    if wanted is not None:
        batch, lengths = (ops.gather(of_rows, wanted, axis=0) for of_rows in (batch, lengths))
        q_rotary = rotary.of_rows(wanted)
    k, v = (ops.cast(y, cache.dtype) for y in (rotary(heads(k, "k")), split_heads(v)))
    paged.append(cache, k, v, rows.batch, rows.positions, layer=layer)
    o, _ = paged.attention(
        cache,
        q_rotary(heads(q, "q")),
        batch,
        lengths,
        layer=layer,
        sm_scale=config.sm_scale,
        window_left=config.window_left(layer),
    )
    return parameters.linear(
        ops.reshape(o, [o.shape[0], config.num_attention_heads * config.head_dim]), f"{at}.o_proj"
    )[0]


def _mlp(parameters: Parameters, x: TensorValue, at: str) -> TensorValue:
    """`down(activation(gate(x)) * up(x))`, `[N, hidden]`."""
    config = parameters.config
    if config.fused_projections:
        gate, up = ops.split(parameters.linear(x, f"{at}.mlp.gate_up_proj")[0], [config.intermediate_size] * 2, axis=-1)
    else:
        gate, up = parameters.linear(x, f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
    gate = ops.silu(gate) if config.activation == "silu" else ops.gelu(gate, approximate="tanh")
    return parameters.linear(gate * up, f"{at}.mlp.down_proj")[0]


def _times(x: TensorValue, factor: float) -> TensorValue:
    return x if factor == 1 else x * factor


def build_step(
    config: DecoderConfig,
    dtype: DType,
    page_size: int,
    module: Module,
    device: DeviceRef | None = None,
    *,
    name: str = STEP,
    weight_prefix: str = "",
) -> None:
    """Adds the graph `name` to `module`: `DecodeInputs` -> logits `[B, vocab]` float32 after each request's last token.

    Batch, tokens and lengths are symbolic. `dtype` is that of weights, activations and cache, of quantised models that
    of the cache alone. Weights are bound when the model is initialised, from the host's memory, by their checkpoint
    names after `weight_prefix`. All inputs and the logits lie on `device`, the CPU where it is None; on a GPU linear
    layers are MAX's matmul.
    """
    device = device or DeviceRef.CPU()
    types = input_types(dtype, cache_shape(config, "pages", page_size), device)
    with Graph(name, input_types=types.flatten(), custom_extensions=[kernels()], module=module) as graph:
        parameters = Parameters.of(graph, config, dtype, device, weight_prefix)
        step = graph_inputs(graph.inputs)
        cache = PagedCache.of(step.blocks, step.lookup_table)
        rows = StepRows.of(step.row_offsets, step.cache_lengths, step.tokens)
        last = ops.cast(step.row_offsets[1:], DType.int64) - 1  # [B]: the last row of each request
        last = last.rebind(step.cache_lengths.shape)
        x = decode(parameters, step.tokens, cache, rows, last)  # [B, hidden]
        graph.output(logits(parameters, x))
