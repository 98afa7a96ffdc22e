"""Low-rank adapters (LoRA): what an adapter adds to the outputs of linear layers, each row by the adapter of its own.

An adapter changes `y = W x` into `y + B (A x)`, with A `[rank, in]` and B `[out, rank]` (Hu et al. 2021, "LoRA:
Low-Rank Adaptation of Large Language Models"; its scale is part of B here). The A of all adapters of a layer are one
stack, and so are their B, transposed: one op adds to each row what its adapter makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, Weight, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.tensors import assembled_tensors, expected_tensors

NO_ADAPTER = -1
"""In place of an adapter's index: a row of the model itself."""
_OTHER_LAYERS = ("c_fc", "shared_expert_gate", "per_layer_input_gate")
"""Linear layers without `proj` in their names."""


@dataclass(frozen=True)
class AdapterStacks:
    """The sizes of a step's stacks."""

    count: int
    """Adapters in each."""
    ranks: tuple[tuple[str, int], ...]
    """The layers that an adapter changes, each with the largest rank there."""

    def tensors(self, config: DecoderConfig) -> dict[str, tuple[int, int, int]]:
        """Name and shape of each stack: A `[count, rank, in]` and B `[count, rank, out]` of a layer."""
        sizes = adaptable_layers(config)
        stacks = {}
        for layer, rank in self.ranks:
            rows, columns = sizes[layer]
            stacks[f"{layer}.lora_A"] = self.count, rank, columns
            stacks[f"{layer}.lora_B"] = self.count, rank, rows
        return stacks


def adaptable_layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The linear layers that an adapter may change, by the step's names: rows and columns of each weight.

    All of the decoder's layers, without routers, experts, and heads of latent attention, whose weights are stacks. Of
    GGUF files with Gated DeltaNet the recurrent layers neither: their heads are in an order of their own.
    """
    has_own_order = config.recurrence is not None and config.recurrence.tiled
    assembled = assembled_tensors(config)
    layers = {}
    for name, shape in expected_tensors(config).items():
        layer = name.removesuffix(".weight")
        leaf = layer.rpartition(".")[2]
        is_linear = layer != name and len(shape) == 2 and ("proj" in leaf or leaf in _OTHER_LAYERS)
        if not is_linear or not name.startswith("model.layers.") or name in assembled:
            continue
        if not (has_own_order and config.is_recurrent(int(layer.split(".")[2]))):
            layers[layer] = shape[0], shape[1]
    return layers


def stack_dtype(config: DecoderConfig, dtype: DType) -> DType:
    """The dtype of stacks: that of the weights, and bfloat16 beside quantised ones, whose products are less exact."""
    return DType.bfloat16 if config.encodings else config.computed_in(dtype)


@dataclass(frozen=True)
class StepAdapters:
    """The adapters of a step's rows."""

    stacks: Mapping[str, TensorValue]
    of_tokens: TensorValue
    """`[T]` int32: the adapter of each row, by its index in the stacks, or `NO_ADAPTER`."""
    of_outputs: TensorValue
    """`[N]`: those of the output rows."""

    @staticmethod
    def of(
        graph: Graph,
        config: DecoderConfig,
        sizes: AdapterStacks,
        dtype: DType,
        of_tokens: TensorValue,
        output_rows: TensorValue,
    ) -> StepAdapters:
        """Adds the stacks to `graph` as weights; `of_tokens` is `[T]` int32."""
        kind = stack_dtype(config, dtype)
        stacks = {
            name: graph.add_weight(Weight(name, kind, shape, DeviceRef.CPU(), align=kind.size_in_bytes))
            for name, shape in sizes.tensors(config).items()
        }
        return StepAdapters(stacks, of_tokens, _taken(of_tokens, output_rows))

    def added(self, x: TensorValue, layer: str, y: TensorValue) -> TensorValue:
        """A layer's output `y` `[M, out]` with what the adapters of its rows make of `x` `[M, in]`; M is T or N."""
        a, b = (self.stacks.get(f"{layer}.{name}") for name in ("lora_A", "lora_B"))
        if a is None or b is None:
            return y
        rows = self.of_tokens if x.shape[0] == self.of_tokens.shape[0] else self.of_outputs
        return paged.adapter_linear(y, x, a, b, rows)


def _taken(x: TensorValue, rows: TensorValue) -> TensorValue:
    """The elements of `x` `[T]` at `rows` `[N]`."""
    return ops.reshape(paged.take_rows(ops.reshape(x, [x.shape[0], 1]), rows), [rows.shape[0]])
