"""A step whose rows form trees of candidate tokens, for speculative decoding: a draft's, or that of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, KernelLibrary, Module, TensorType, TensorValue

from paged_kv.graphs.inputs import graph_inputs, input_types
from paged_kv.graphs.layers import StepRows
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import PagedCache, cache_dtype, kernels
from paged_kv.graphs.trees import LARGEST_TREE, TreeRows, move_tokens, tree_attention
from paged_kv.kv_formats import KVFormat


@dataclass(frozen=True)
class TreeStepRows(StepRows):
    """The rows of a step of trees, for layers of any window."""

    by_window: Mapping[int, TreeRows]
    """By `window_left`: all the same but for mask and window."""

    @staticmethod
    def of_trees(
        parents: TensorValue,
        row_offsets: TensorValue,
        cache_lengths: TensorValue,
        config: DecoderConfig,
        largest_tree: int,
    ) -> TreeStepRows:
        windows = {config.window_left(layer) for layer in range(config.num_hidden_layers)}
        by_window = {
            window: TreeRows.of(parents, row_offsets, cache_lengths, window_left=window, largest_tree=largest_tree)
            for window in sorted(windows)
        }
        rows = next(iter(by_window.values()))
        return TreeStepRows(rows.batch, rows.positions, rows.lengths, by_window)

    @property
    def slots(self) -> TensorValue:
        return next(iter(self.by_window.values())).slots

    def attend(
        self,
        cache: PagedCache,
        q: TensorValue,
        *,
        layer: int,
        sm_scale: float | None,
        logits_soft_cap: float,
        window_left: int,
        sinks: TensorValue | None = None,
    ) -> TensorValue:
        o, _ = tree_attention(
            cache,
            q,
            self.by_window[window_left],
            layer=layer,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
        )
        return o


def build_tree_step(
    config: DecoderConfig,
    dtype: DType,
    module: Module,
    device: DeviceRef | None = None,
    *,
    name: str,
    layers: int | None = None,
    largest_tree: int = LARGEST_TREE,
    kv_format: KVFormat | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """Adds the graph `name` to `module`: `DecodeInputs` and parents `[T]` int32 -> logits `[T, vocab]` float32, after
    each row.

    A row's K and V go to slot `cache_length + i`, where `i` is its number in its request. `layers` is how many of the
    model's layers are computed, the first ones; all where None. Fewer are a draft of the model over the same pages: it
    reads and writes the K and V of these layers, which are the model's own. All else is as in `decoder.build_step`.
    """
    device = device or DeviceRef.CPU()
    shape = decoder.cache_shape(config, "pages", "page_size", kv_format)
    inputs = input_types(cache_dtype(dtype, kv_format), shape, device)
    types = [*inputs.flatten(), TensorType(DType.int32, ["T"], device)]
    config = replace(config, num_hidden_layers=layers or config.num_hidden_layers)
    extensions = [] if library else [kernels()]
    with Graph(name, input_types=types, custom_extensions=extensions, kernel_library=library, module=module) as graph:
        parameters = Parameters.of(graph, config, dtype, device)
        *values, parents = graph.inputs
        step = graph_inputs(values)
        cache = PagedCache.of(step.blocks, step.lookup_table, kv_format=kv_format)
        rows = TreeStepRows.of_trees(
            parents.tensor, step.row_offsets, step.cache_lengths, config, largest_tree=largest_tree
        )
        (x,) = decoder.decode([decoder.DeviceStep(parameters, step.tokens, cache, rows, None)])  # [T, hidden]
        graph.output(decoder.logits(parameters, x))


def build_moves(
    config: DecoderConfig,
    dtype: DType,
    module: Module,
    device: DeviceRef | None = None,
    *,
    name: str,
    kv_format: KVFormat | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """Adds the graph `name` to `module`: `move_tokens` in a cache.

    Its inputs are requests, sources and targets (each `[N]` int32), the lookup table and the cache.
    """
    device = device or DeviceRef.CPU()
    shape = decoder.cache_shape(config, "pages", "page_size", kv_format)
    inputs = input_types(cache_dtype(dtype, kv_format), shape, device)
    number = TensorType(DType.int32, ["N"], device)
    types: list[TensorType | BufferType] = [number, number, number, inputs.lookup_table, inputs.blocks]
    extensions = [] if library else [kernels()]
    with Graph(name, input_types=types, custom_extensions=extensions, kernel_library=library, module=module) as graph:
        *numbers, table, blocks = graph.inputs
        cache = PagedCache.of(blocks.buffer, table.tensor, kv_format=kv_format)
        move_tokens(cache, *(number.tensor for number in numbers))
        graph.output()
