"""The decoder of every family: its step as a MAX graph that prefills and decodes, on one device or on several.

Families differ in the switches of `DecoderConfig` alone. `decode` and `logits` build on values of any graph (the
server has inputs of its own); `build_step` makes the graph that the engine runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, KernelLibrary, Module, TensorType, TensorValue, ops

from paged_kv.errors import ContractError
from paged_kv.graphs import ops as paged
from paged_kv.graphs.inputs import graph_inputs, graph_states, input_types, state_input_types, window_input_types
from paged_kv.graphs.layers import Rotary, StepRows
from paged_kv.graphs.models.adapters import AdapterStacks, StepAdapters
from paged_kv.graphs.models.attention import attention
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.experts import chosen_experts
from paged_kv.graphs.models.latent import latent_attention
from paged_kv.graphs.models.parameters import Parameters, times
from paged_kv.graphs.models.recurrent import recurrent_layer
from paged_kv.graphs.models.tensors import NORMS, PARALLEL_NORMS
from paged_kv.graphs.ops import LatentCache, PagedCache, States, cache_dtype, kernels
from paged_kv.graphs.paged_cache import constant
from paged_kv.graphs.rope import Rope
from paged_kv.kv_formats import KVFormat
from paged_kv.options import stored_head

STEP = "decoder_step"
DRAFT_PREFIX = "draft."
"""Stands before the names of the weights of a draft layer."""
Output = Literal["logits", "hidden"]
"""What a step computes of its output rows: logits `[N, vocab]`, or the normed hidden states `[N, hidden]`."""


def cache_shape(
    config: DecoderConfig,
    pages: int | str,
    page_size: int | str,
    kv_format: KVFormat | None = None,
    *,
    windows: bool = False,
) -> list[int | str]:
    """`[pages, 2, layers, page_size, Hk, D]`: one buffer for the K and V of every layer that attends; where
    `config.separate_windows`, one for the layers with `windows` and one for the others.

    A head of codes is as long as `options.stored_head` says. With latent attention `[pages, layers, page_size, width]`:
    one latent a token, and the rotated part beside it.

    Raises:
        ContractError: latents as codes.
    """
    if config.latent is not None:
        if kv_format is not None:
            raise ContractError(f"cache dtype {kv_format}: a cache of latents has no codes")
        return [pages, config.num_hidden_layers, page_size, config.latent.kv_rank + config.latent.rope_dim]
    kv_heads, head_dim = config.cache_heads(windows=windows)
    head = stored_head(kv_format or "", head_dim)
    return [pages, 2, config.cache_layers(windows), page_size, kv_heads, head]


def state_shapes(config: DecoderConfig, slots: int | str) -> list[list[int | str]]:
    """The buffers of states beside the pages, float32; none where no layer is recurrent."""
    if config.recurrence is None:
        return []
    shapes = (config.recurrence.conv_shape(slots), config.recurrence.matrix_shape(slots))
    return [shape for shape in shapes if shape is not None]


def state_bytes(config: DecoderConfig) -> int:
    """Bytes of one slot of state; 0 where no layer is recurrent."""
    return sum(DType.float32.size_in_bytes * math.prod(map(int, shape)) for shape in state_shapes(config, 1))


@dataclass(frozen=True)
class DeviceStep:
    """One step on one device: the tokens of the batch, and the device's part of the weights and of the cache."""

    parameters: Parameters
    tokens: TensorValue
    """`[T]`, the same on every device."""
    cache: PagedCache | LatentCache
    """The cache of the KV heads that the device has; changed in place."""
    rows: StepRows
    output_rows: TensorValue | None
    """`[N]` int32: the rows whose hidden states are returned; None: all."""
    states: States | None = None
    """States of recurrent layers; replaced in place."""
    windows: PagedCache | None = None
    """The pages of layers with windows, where `config.separate_windows`."""

    def of_output_rows(self) -> DeviceStep:
        """The step of the output rows alone."""
        if self.output_rows is None:
            return self
        return replace(self, rows=self.rows.of_rows(self.output_rows), output_rows=None)


AddUp = Callable[[list[TensorValue]], list[TensorValue]]
"""Sums tensors of one shape, one a device; each device gets the sum."""


@dataclass(frozen=True)
class LayerStates:
    """Hidden states `[T, hidden]` of one device that come into the layers, or are taken out of them, for drafts."""

    first: TensorValue | None = None
    """The input of the first layer, in place of the embeddings."""
    first_normed: TensorValue | None = None
    """What the first layer's attention takes, in place of the norm of its input."""
    inputs: dict[int, TensorValue] = field(default_factory=dict)
    """Gets the input of each of `taken`."""
    taken: tuple[int, ...] = ()
    """The layers whose inputs are taken, none after `config.last_writing_layer`."""


def decode(
    steps: Sequence[DeviceStep], add_up: AddUp = lambda parts: parts, states: LayerStates | None = None
) -> list[TensorValue]:
    """The hidden states after all layers, `[N, hidden]`, on each device.

    Args:
        add_up: Adds the parts of several devices, each of which computes its heads and its part of the MLP's inner
            dimension; what they have in common is their sum (tensor parallelism).
        states: Of one device.
    """
    config = steps[0].parameters.config
    rotaries = [_rotaries(step) for step in steps]
    attention_in, attention_out, mlp_in, mlp_out = NORMS[config.norm_place]
    states = states or LayerStates()
    xs = [step.parameters.embed(step.tokens) for step in steps] if states.first is None else [states.first]
    inputs = [layer_inputs(step.parameters, step.tokens, x) for step, x in zip(steps, xs, strict=True)]
    for layer in range(config.num_hidden_layers):
        rope = config.layer_rope(layer)
        # From the last layer that writes K and V on, only the output rows reach the logits.
        of_use = [step.output_rows if layer == config.last_writing_layer else None for step in steps]
        parts: list[TensorValue] = []
        if layer in states.taken:
            states.inputs[layer] = xs[0]
        if layer == 0 and states.first_normed is not None:
            ys = [states.first_normed]
        else:
            ys = _normed(steps, layer, attention_in, xs)
        if config.has_mixer(layer):
            parts = [
                _mixer(step, y, rotary[rope], layer, rows)
                for step, y, rotary, rows in zip(steps, ys, rotaries, of_use, strict=True)
            ]
        xs, ys = _taken(xs, of_use), _taken(ys, of_use)
        if layer == config.last_writing_layer:
            pairs = zip(inputs, of_use, strict=True)
            inputs = [None if each is None else _taken([each], [rows])[0] for each, rows in pairs]
        if layer == config.last_writing_layer and layer + 1 < config.num_hidden_layers:
            rotaries = [_of_rows(rotary, rows) for rotary, rows in zip(rotaries, of_use, strict=True)]
            steps = [step.of_output_rows() for step in steps]
        if config.norm_place == "before both":
            outputs = zip(steps, ys, parts, strict=True)
            parts = [part + _feed_forward(step.parameters, y, layer) for step, y, part in outputs]
        else:
            if config.has_mixer(layer):
                xs = _plus(config, xs, _normed(steps, layer, attention_out, add_up(parts)))
            if not config.has_mlp(layer):
                continue
            if not config.mlp_or_mixer:
                ys = _normed(steps, layer, mlp_in, xs)
            parts = [_feed_forward(step.parameters, y, layer, x) for step, x, y in zip(steps, xs, ys, strict=True)]
        xs = _plus(config, xs, _normed(steps, layer, mlp_out, add_up(parts)))
        xs = [_with_input(step.parameters, x, each, layer) for step, x, each in zip(steps, xs, inputs, strict=True)]
    return xs


def joined(parts: Sequence[TensorValue], places: TensorValue) -> TensorValue:
    """The columns of `n` tensors `[T, C]`, one after the other, `[T, n * C]`; row t of `places` `[T, n]` int32 is t."""
    count, (rows, columns) = len(parts), parts[0].shape
    repeated = ops.reshape(places, [rows * count])
    total: TensorValue | None = None
    for at, part in enumerate(parts):
        chosen = ops.cast(constant(np.eye(count, dtype=np.float32)[at], part.device), part.dtype)
        chosen = ops.reshape(ops.broadcast_to(chosen, [rows, count]), [rows * count, 1])
        piece = paged.take_rows(part, repeated) * chosen
        total = piece if total is None else total + piece
    assert total is not None
    return ops.reshape(total, [rows, count * int(columns)])


def _taken(xs: list[TensorValue], of_use: list[TensorValue | None]) -> list[TensorValue]:
    """Each device's rows that are of use."""
    return [x if rows is None else paged.take_rows(x, rows) for x, rows in zip(xs, of_use, strict=True)]


def _normed(steps: Sequence[DeviceStep], layer: int, name: str | None, xs: list[TensorValue]) -> list[TensorValue]:
    """Each device's tensor through a norm of a layer; as it is where the family has none there."""
    if name is None:
        return xs
    return [step.parameters.norm(f"model.layers.{layer}.{name}", x) for step, x in zip(steps, xs, strict=True)]


def _plus(config: DecoderConfig, xs: list[TensorValue], ys: list[TensorValue]) -> list[TensorValue]:
    return [paged.add_scaled(x, y, config.residual_multiplier) for x, y in zip(xs, ys, strict=True)]


def _of_rows(rotaries: dict[Rope | None, Rotary | None], rows: TensorValue | None) -> dict[Rope | None, Rotary | None]:
    """Each rotation of the rows that are of use."""
    if rows is None:
        return rotaries
    return {rope: None if rotary is None else rotary.of_rows(rows) for rope, rotary in rotaries.items()}


def _rotaries(step: DeviceStep) -> dict[Rope | None, Rotary | None]:
    config = step.parameters.config
    ropes = {config.layer_rope(layer) for layer in range(config.num_hidden_layers)}
    return {rope: None if rope is None else Rotary.of(step.rows.positions, rope) for rope in sorted(ropes, key=repr)}


def logits(parameters: Parameters, x: TensorValue) -> TensorValue:
    """The logits `[N, vocab]` float32 of hidden states `[N, hidden]`."""
    config = parameters.config
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    y = parameters.linear(parameters.norm("model.norm", x), head)[0]
    if config.logits_divisor != 1:
        y = y / config.logits_divisor
    if config.logits_cap:
        y = ops.tanh(y / config.logits_cap) * config.logits_cap
    return paged.widened(y)


def hidden_states(parameters: Parameters, x: TensorValue) -> TensorValue:
    """The hidden states `[N, hidden]` as the head sees them, normed, in float32."""
    return paged.widened(parameters.norm("model.norm", x))


def _mixer(
    step: DeviceStep, x: TensorValue, rotary: Rotary | None, layer: int, output_rows: TensorValue | None
) -> TensorValue:
    """What the attention or the recurrence of a layer makes of `x` `[T, hidden]`: all rows, or `output_rows` `[N]`."""
    parameters, cache = step.parameters, step.cache
    if parameters.config.is_recurrent(layer):
        assert step.states is not None
        y = recurrent_layer(parameters, step.states, x, layer)
        return y if output_rows is None else paged.take_rows(y, output_rows)
    if isinstance(cache, LatentCache):
        assert rotary is not None
        return latent_attention(parameters, cache, step.rows, x, rotary, layer, output_rows)
    if step.windows is not None and parameters.config.in_window_cache(layer):
        cache = step.windows
    return attention(parameters, cache, step.rows, x, rotary, layer, output_rows)


def _feed_forward(
    parameters: Parameters, y: TensorValue, layer: int, residual: TensorValue | None = None
) -> TensorValue:
    """The feed-forward block of a layer, `[N, hidden]`: MLP(y), experts(y), MLP(y) + shared experts(y), or
    MLP(y) + experts(residual), where `y` `[N, hidden]` is normed and `residual` is not yet.
    """
    of_layer, config = f"model.layers.{layer}", parameters.config
    at = f"{of_layer}.mlp"
    if config.experts is None or not config.has_experts(layer):
        return _mlp(parameters, y, f"{of_layer}.{config.mlp}")
    if config.experts.parallel and residual is not None:
        after, before, after_experts = (f"{of_layer}.{name}" for name in PARALLEL_NORMS)
        of_experts = chosen_experts(parameters, parameters.norm(before, residual), at, of_router=residual)
        dense = parameters.norm(after, _mlp(parameters, y, at))
        return paged.add_scaled(dense, parameters.norm(after_experts, of_experts))
    routed = chosen_experts(parameters, y, at)
    if not config.experts.shared_inner:
        return routed
    shared = _mlp(parameters, y, f"{at}.shared_experts")
    if config.experts.shared_gate:
        shared = paged.gate_units(parameters.linear(y, f"{at}.shared_expert_gate")[0], shared, "sigmoid")
    return paged.add_scaled(routed, shared)


def _mlp(parameters: Parameters, x: TensorValue, at: str) -> TensorValue:
    """`down(activation(gate(x)) * up(x))`, `[N, hidden]`; of several devices, the part of its inner dimension."""
    config = parameters.config
    if not config.gated:
        (inner,) = parameters.linear(x, f"{at}.c_fc")
        # The square of what is positive is ReLU times the number itself.
        units = paged.gate_units(inner, inner, "relu") if config.activation == "relu2" else ops.gelu(inner, "tanh")
        return parameters.linear(units, f"{at}.c_proj")[0]
    if config.fused_gate_up:
        gate_up = parameters.linear(x, f"{at}.gate_up_proj")[0]
        gate, up = paged.split_columns(gate_up, [int(gate_up.shape[1]) // 2] * 2)
    else:
        gate, up = parameters.linear(x, f"{at}.gate_proj", f"{at}.up_proj")
    units = paged.gate_units(gate, up, "silu" if config.activation == "silu" else "gelu_tanh")
    return parameters.linear(units, f"{at}.down_proj")[0]


def layer_inputs(parameters: Parameters, tokens: TensorValue, x: TensorValue) -> TensorValue | None:
    """The inputs of all layers, `[T, layers * size]`, from tokens `[T]` and their embeddings `x`; None where the model
    has none.
    """
    config = parameters.config
    if config.layer_inputs is None:
        return None
    size = config.layer_inputs.size
    of_tokens = parameters.rows("model.embed_tokens_per_layer", tokens, size**0.5)
    (of_states,) = parameters.linear(x, "model.per_layer_model_projection")
    by_layer = ops.reshape(times(of_states, config.hidden_size**-0.5), [x.shape[0], config.num_hidden_layers, size])
    normed = parameters.norm("model.per_layer_projection_norm", by_layer)
    return times(ops.reshape(normed, of_tokens.shape) + of_tokens, 2**-0.5)


def _with_input(parameters: Parameters, x: TensorValue, inputs: TensorValue | None, layer: int) -> TensorValue:
    """A layer's output with what its own input adds, and scaled; as it is in most models."""
    config, at = parameters.config, f"model.layers.{layer}"
    if inputs is not None and config.layer_inputs is not None:
        of_layer = paged.take_columns(inputs, layer * config.layer_inputs.size, config.layer_inputs.size)
        units = paged.gate_units(parameters.linear(x, f"{at}.per_layer_input_gate")[0], of_layer, "gelu_tanh")
        (y,) = parameters.linear(units, f"{at}.per_layer_projection")
        x = paged.add_scaled(x, parameters.norm(f"{at}.post_per_layer_input_norm", y))
    return x * parameters.values[f"{at}.layer_scalar"] if config.layer_scalar else x


def build_step(
    config: DecoderConfig,
    dtype: DType,
    module: Module,
    device: DeviceRef | None = None,
    *,
    name: str = STEP,
    weight_prefix: str = "",
    kv_format: KVFormat | None = None,
    adapters: AdapterStacks | None = None,
    library: KernelLibrary | None = None,
    draft: DecoderConfig | None = None,
    output: Output = "logits",
) -> None:
    """Adds the graph `name` to `module`: `DecodeInputs`, `WindowInputs` where `config.separate_windows`,
    `StateInputs` of a hybrid model, `[T]` int32 where `config.has_window_lengths` (the tokens before the end of each
    token's window), rows `[N]` int32, and with `adapters` that of each token, `[T]` int32 -> logits `[N, vocab]`
    float32 after the rows, or another `output`.

    A row is a token's place in `DecodeInputs.tokens`. Batch, tokens, lengths and the page size are symbolic. `dtype` is
    that of weights, activations and cache, of quantised models that of the cache alone; with `kv_format` the cache
    holds such codes. Weights are bound when the model is initialised, from the host's memory, by their checkpoint names
    after `weight_prefix`. All inputs and the logits lie on `device`, the CPU where it is None; on a GPU linear layers
    are MAX's matmul. `library` says which ops there are, the package's sources where it is None. With a `draft` layer a
    second output is the hidden states of all rows that it takes, `[T, hidden]` float32, and of EAGLE-3 a last input
    the `places` of `joined`, `[T, layers]`.
    """
    device = device or DeviceRef.CPU()
    kind = cache_dtype(dtype, kv_format)
    inputs = input_types(kind, cache_shape(config, "pages", "page_size", kv_format), device)
    types = inputs.flatten()
    if config.separate_windows:
        shape = cache_shape(config, "window_pages", "page_size", kv_format, windows=True)
        types += window_input_types(kind, shape, device).flatten()
    types += state_input_types(state_shapes(config, "slots"), device).flatten()
    if config.has_window_lengths:
        types.append(TensorType(DType.int32, ["T"], device))
    types.append(TensorType(DType.int32, ["N"], device))
    if adapters is not None:
        types.append(TensorType(DType.int32, ["T"], device))
    head = None if draft is None else draft.draft_head
    if head is not None and head.layers:
        types.append(TensorType(DType.int32, ["T", len(head.layers)], device))
    extensions = [] if library else [kernels()]
    with Graph(name, input_types=types, custom_extensions=extensions, kernel_library=library, module=module) as graph:
        parameters = Parameters.of(graph, config, dtype, device, weight_prefix)
        count = len(inputs.flatten())
        step, values = graph_inputs(graph.inputs[:count]), list(graph.inputs[count:])
        places = values.pop().tensor if head is not None and head.layers else None
        of_tokens = None if adapters is None else values.pop().tensor
        output_rows = values.pop().tensor
        if adapters is not None and of_tokens is not None:
            of_rows = StepAdapters.of(graph, config, adapters, dtype, of_tokens, output_rows)
            parameters = replace(parameters, adapters=of_rows)
        windows = None
        if config.separate_windows:
            table, blocks, *values = values
            windows = PagedCache.of(blocks.buffer, table.tensor, kv_format=kv_format)
        if config.latent is None:
            cache: PagedCache | LatentCache = PagedCache.of(step.blocks, step.lookup_table, kv_format=kv_format)
        else:
            cache = LatentCache(step.blocks, step.lookup_table)
        rows = StepRows.of(step.row_offsets, step.cache_lengths, step.tokens)
        if not config.causal:
            rows = rows.both_ways(values.pop().tensor if config.has_window_lengths else None)
        states = States.of(graph_states(values), step.row_offsets) if values else None
        # A layer of multi-token prediction takes the last hidden states of all rows.
        last_rows = output_rows if head is None or places is not None else None
        only = DeviceStep(parameters, step.tokens, cache, rows, last_rows, states, windows)
        taken = LayerStates(taken=() if head is None else head.layers)
        (x,) = decode([only], states=taken)  # [N, hidden]
        if draft is None:
            graph.output(logits(parameters, x) if output == "logits" else hidden_states(parameters, x))
        elif places is None:
            hidden = parameters.norm("model.norm", x)
            graph.output(logits(parameters, paged.take_rows(x, output_rows)), paged.widened(hidden))
        else:
            of_draft = Parameters.of(graph, draft, dtype, device, DRAFT_PREFIX)
            of_layers = joined([taken.inputs[layer] for layer in taken.taken], places)
            hidden = of_draft.linear(of_layers, "model.fc")[0]
            graph.output(logits(parameters, x), paged.widened(hidden))
