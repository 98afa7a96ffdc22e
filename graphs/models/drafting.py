"""A layer that drafts tokens from a model's hidden states: multi-token prediction (MTP), and EAGLE-3.

The layer's row of the token at position j takes the token's embedding and the hidden state of the token before:

- MTP (DeepSeek-V3, section 2.2; GLM-4.5, Qwen3-Next): `eh_proj([enorm(embedding) | hnorm(hidden)])` goes through an
  ordinary layer of the model. The hidden state is the model's after its last norm.
- EAGLE-3 (arXiv 2503.01840): the hidden state is `fc` of the inputs of three of the model's layers. The attention takes
  `[input_layernorm(embedding) | hidden_norm(hidden)]`, and its output is added to the hidden state.

The logits after the row are of the token at j + 1. Its own hidden state takes the place of the model's for the draft
after it. So slot j of the layer's K and V depends on tokens up to j alone, as a slot of the model's does, and a page
has both. In training the first row is that of position 1. Slot 0, which has no token before it, takes the hidden state
of its own token: its key is then much like that of slot 1, which attention uses as a sink.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, Graph, KernelLibrary, Module, TensorType, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.inputs import graph_inputs, input_types
from paged_kv.graphs.layers import StepRows
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.decoder import (
    DRAFT_PREFIX,
    DeviceStep,
    LayerStates,
    cache_shape,
    decode,
    joined,
    logits,
)
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import LatentCache, PagedCache, cache_dtype
from paged_kv.kv_formats import KVFormat

DRAFT_STEP = "draft_step"


def build_draft_step(
    config: DecoderConfig,
    dtype: DType,
    module: Module,
    *,
    kv_format: KVFormat | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """Adds the graph to `module`, on the CPU: `DecodeInputs` over the layer's own buffer, hidden states `[T, hidden]`
    float32, `places` `[T, 2]` of `joined`, and rows `[N]` int32 -> logits `[N, vocab]` and hidden states `[N, hidden]`
    after them, float32. K and V of all rows are appended. `config.draft_head` says what the layer is.
    """
    head, device = config.draft_head, DeviceRef.CPU()
    assert head is not None
    inputs = input_types(
        cache_dtype(dtype, kv_format), cache_shape(config, "pages", "page_size", kv_format), device
    ).flatten()
    types = [
        *inputs,
        TensorType(DType.float32, ["T", config.hidden_size], device),
        TensorType(DType.int32, ["T", 2], device),
        TensorType(DType.int32, ["N"], device),
    ]
    with Graph(DRAFT_STEP, input_types=types, kernel_library=library, module=module) as graph:
        parameters = Parameters.of(graph, config, dtype, device, DRAFT_PREFIX)
        step = graph_inputs(graph.inputs[: len(inputs)])
        hidden, places, output_rows = (value.tensor for value in graph.inputs[len(inputs) :])
        hidden = ops.cast(hidden, config.computed_in(dtype))
        embedded = parameters.embed(step.tokens)
        if head.kind == "mtp":
            both = [parameters.norm("model.enorm", embedded), parameters.norm("model.hnorm", hidden)]
            first = LayerStates(parameters.linear(joined(both, places), "model.eh_proj")[0])
        else:
            normed = parameters.norm("model.layers.0.hidden_norm", hidden)
            both = [parameters.norm("model.layers.0.input_layernorm", embedded), normed]
            first = LayerStates(normed if head.adds_normed else hidden, joined(both, places))
        cache: PagedCache | LatentCache
        if config.latent is None:
            cache = PagedCache.of(step.blocks, step.lookup_table, kv_format=kv_format)
        else:
            cache = LatentCache(step.blocks, step.lookup_table)
        rows = StepRows.of(step.row_offsets, step.cache_lengths, step.tokens)
        (x,) = decode([DeviceStep(parameters, step.tokens, cache, rows, output_rows)], states=first)
        own = parameters.norm("model.norm", x) if head.feeds_normed else x
        graph.output(logits(parameters, x), paged.widened(own))
