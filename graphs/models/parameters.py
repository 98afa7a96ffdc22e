"""The weights of a model as values of a graph: their names, and each device's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, Weight, ops

from paged_kv.errors import ContractError
from paged_kv.graphs import ops as paged
from paged_kv.graphs.encodings import row_bytes
from paged_kv.graphs.models.adapters import StepAdapters
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.tensors import expected_tensors, weight_dtype
from paged_kv.graphs.paged_cache import constant
from paged_kv.graphs.quantised import QuantisedWeight, quantised_expert_linear, quantised_linear, quantised_rows


@dataclass(frozen=True)
class Parameters:
    """The model's weights as values of a graph, and the layers that take nothing but weights."""

    config: DecoderConfig
    values: Mapping[str, TensorValue]
    """By checkpoint name; those of `config.encodings` are their blocks."""
    adapters: StepAdapters | None = None

    @staticmethod
    def of(graph: Graph, config: DecoderConfig, dtype: DType, device: DeviceRef, prefix: str = "") -> Parameters:
        """Adds every weight to `graph`, to be bound under its checkpoint name after `prefix` from the host's memory.

        Those of `config.encodings` are their blocks, the others of `config.computed_in(dtype)`.
        """
        dtype = config.computed_in(dtype)
        quantised = dict(config.encodings)
        values = {}
        for name, shape in expected_tensors(config).items():
            kind = weight_dtype(name, dtype)
            align = kind.size_in_bytes  # the loader aligns to the dtype; MAX's default is larger
            if name in quantised:
                kind, align, shape = DType.uint8, 1, (*shape[:-1], row_bytes(quantised[name], shape[-1]))
            values[name] = graph.add_weight(Weight(prefix + name, kind, shape, device, align=align))
        return Parameters(config, values)

    @staticmethod
    def shares(
        graph: Graph, config: DecoderConfig, dtype: DType, devices: Sequence[DeviceRef], prefix: str = ""
    ) -> list[Parameters]:
        """Each device's share (tensor parallelism): its heads, its part of the inner dimension, and all other weights.

        Weights are bound as `of` binds them, and cut on the host.

        Raises:
            ContractError: the model cannot be shared by so many devices.
        """
        if len(devices) == 1:
            return [Parameters.of(graph, config, dtype, devices[0], prefix)]
        share = _share(config, len(devices))
        whole = Parameters.of(graph, config, dtype, DeviceRef.CPU(), prefix).values
        shares = []
        for index, device in enumerate(devices):
            parts = {name: _part(config, name, value, index, len(devices)) for name, value in whole.items()}
            shares.append(Parameters(share, {name: p.to(device) for name, p in parts.items() if p is not None}))
        return shares

    def linear(self, x: TensorValue, *names: str) -> list[TensorValue]:
        """`x` `[M, in]` through several linear layers: `[M, out]` each."""
        weights = [self.weight(f"{name}.weight") for name in names]
        dense = [weight for weight in weights if not isinstance(weight, QuantisedWeight)]
        quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        products = iter(paged.linear_group(x, dense) if dense else [])
        of_blocks = iter(quantised_linear(x, *quantised) if quantised else [])
        ys = [next(of_blocks if isinstance(weight, QuantisedWeight) else products) for weight in weights]
        biases = [self.values.get(f"{name}.bias") for name in names]
        ys = [y if bias is None else y + ops.cast(bias, y.dtype) for y, bias in zip(ys, biases, strict=True)]
        if self.adapters is None:
            return ys
        return [self.adapters.added(x, name, y) for name, y in zip(names, ys, strict=True)]

    def norm(self, name: str | None, x: TensorValue, eps: float | None = None) -> TensorValue:
        """The norm of the last axis, without weights where `name` is None; with the configuration's `eps` where that
        is None.
        """
        config = self.config
        eps = config.norm_eps if eps is None else eps
        if name is None:
            ones = ops.cast(constant(np.ones(int(x.shape[-1]), np.float32), x.device), x.dtype)
            return paged.rms_norm(x, ones, eps)
        weight = self.values[f"{name}.weight"]
        if config.layer_norm:
            bias = self.values.get(f"{name}.bias")
            return layer_norm(x, weight, bias, eps)
        return paged.rms_norm(x, weight, eps, offset=config.norm_offset, rounds_once=config.norm_rounds_once)

    def embed(self, tokens: TensorValue) -> TensorValue:
        """Token ids `[T]`, int32 or int64 -> `[T, hidden]`."""
        return self.rows("model.embed_tokens", tokens, self.config.embedding_multiplier)

    def rows(self, name: str, tokens: TensorValue, factor: float) -> TensorValue:
        """The rows `[T, D]` of a weight that token ids `[T]` name, times a factor."""
        weight = self.weight(f"{name}.weight")
        if isinstance(weight, QuantisedWeight):
            x = quantised_rows(weight, tokens)
        else:
            x = paged.take_rows(weight, tokens if tokens.dtype == DType.int32 else ops.cast(tokens, DType.int32))
        return times(x, factor)

    def experts(self, x: TensorValue, chosen: TensorValue, *names: str) -> list[TensorValue]:
        """`x` `[T, in]` or `[T, C, in]` through stacks of experts, each row through those that `chosen` `[T, C]` names:
        `[T, C, out]` each.
        """
        weights = [self.weight(f"{name}.weight") for name in names]
        quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        of_blocks = iter(quantised_expert_linear(x, chosen, *quantised) if quantised else [])
        ys = [
            next(of_blocks) if isinstance(weight, QuantisedWeight) else paged.expert_linear(x, weight, chosen)
            for weight in weights
        ]
        biases = [self.values.get(f"{name}.bias") for name in names]
        biases = [bias if bias is None else ops.gather(bias, chosen, axis=0) for bias in biases]
        return [y if bias is None else y + ops.cast(bias, y.dtype) for y, bias in zip(ys, biases, strict=True)]

    def weight(self, name: str) -> TensorValue | QuantisedWeight:
        """A weight as it multiplies."""
        encoding = dict(self.config.encodings).get(name)
        value = self.values[name]
        return value if encoding is None else QuantisedWeight(value, encoding)


def _share(config: DecoderConfig, count: int) -> DecoderConfig:
    """The model as one of `count` devices computes it."""
    if config.qk_norm == "all_heads":
        raise ContractError("devices: a model whose q and k are normed over all heads runs on one device")
    if config.latent is not None or config.experts is not None:
        raise ContractError("devices: a model with latent attention or experts runs on one device")
    if config.recurrence is not None:
        raise ContractError("devices: a model with recurrent layers runs on one device")
    if config.separate_windows or config.full_heads is not None:
        raise ContractError("devices: a model whose layers with windows have pages or heads of their own runs on one")
    if config.encodings:
        raise ContractError("devices: quantised weights run on the CPU alone")
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in sizes:
        if getattr(config, name) % count:
            raise ContractError(f"devices: {name} = {getattr(config, name)} is no multiple of {count} devices")
    return replace(config, **{name: getattr(config, name) // count for name in sizes})


def _part(config: DecoderConfig, name: str, value: TensorValue, index: int, count: int) -> TensorValue | None:
    """The device's part of a weight; None of a bias that only the first device adds to the sum."""
    layer, kind = name.split(".")[-2:]
    if layer in ("o_proj", "down_proj", "c_proj"):
        if kind == "bias":
            return value if index == 0 else None
        columns = int(value.shape[1]) // count
        return value[:, index * columns : (index + 1) * columns]
    keys = config.num_key_value_heads * config.head_dim
    pieces = {
        "qkv_proj": (config.num_attention_heads * config.head_dim, keys, keys),
        "gate_up_proj": (config.intermediate_size,) * 2,
    }.get(layer)
    if pieces is None:
        if layer not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc"):
            return value
        pieces = (int(value.shape[0]),)
    parts, start = [], 0
    for size in pieces:
        rows = size // count
        parts.append(value[start + index * rows : start + (index + 1) * rows])
        start += size
    return parts[0] if len(parts) == 1 else ops.concat(parts, axis=0)


def layer_norm(x: TensorValue, weight: TensorValue, bias: TensorValue | None, eps: float) -> TensorValue:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` of the last axis, in float32, rounded once."""
    wide = ops.cast(x, DType.float32)
    wide = wide - ops.mean(wide, axis=-1)
    y = wide * ops.rsqrt(ops.mean(wide * wide, axis=-1) + eps) * ops.cast(weight, DType.float32)
    return ops.cast(y if bias is None else y + ops.cast(bias, DType.float32), x.dtype)


def times(x: TensorValue, factor: float) -> TensorValue:
    return x if factor == 1 else x * factor
