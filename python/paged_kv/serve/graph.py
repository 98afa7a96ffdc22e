"""The step that MAX Serve runs: its inputs and outputs around this package's decoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorValue, Type, ops
from max.nn.kv_cache import KVCacheInputsPerDevice, KVCacheParamInterface
from max.nn.transformer import ReturnLogits
from max.nn.transformer.transformer import logits_postprocess

from paged_kv.graphs.layers import StepRows
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.decoder import Parameters, decode, logits
from paged_kv.graphs.ops import PagedCache


@dataclass(frozen=True)
class ServedStep:
    """One step as MAX's pipelines trace it: ragged tokens and a paged cache -> logits."""

    config: DecoderConfig
    dtype: DType
    kv_params: KVCacheParamInterface
    device: DeviceRef
    return_logits: ReturnLogits

    def trace(
        self,
        *input_types: Type[Any],
        name: str,
        module: Module | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """The graph, added to `module` where there is one; weights keep their checkpoint names.

        Args:
            input_types: tokens `[T]` int64, row offsets `[B + 1]` uint32, the number of logits wanted a request `[1]`
                int64, and the leaves of the cache's inputs.

        Outputs are float32: the logits after each request's last token `[B, vocab]`; where MAX asks for more, also
        those of more tokens `[N, vocab]` and their offsets.
        """
        with Graph(
            name,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        ) as graph:
            tokens, row_offsets, number_of_logits, *kv_inputs = graph.inputs
            graph.output(*self._logits(graph, tokens.tensor, row_offsets.tensor, number_of_logits.tensor, kv_inputs))
        return graph

    def _logits(
        self,
        graph: Graph,
        tokens: TensorValue,
        row_offsets: TensorValue,
        number_of_logits: TensorValue,
        kv_inputs: Iterable[Any],
    ) -> tuple[TensorValue, ...]:
        (kv,) = tree.leaves(self.kv_params.unflatten_kv_inputs(iter(kv_inputs)), leaf=KVCacheInputsPerDevice)
        parameters = Parameters.of(graph, self.config, self.dtype, self.device)
        cache = PagedCache.of(kv.kv_blocks, kv.lookup_table)
        rows = StepRows.of(row_offsets, kv.cache_lengths, tokens)
        if self.return_logits == ReturnLogits.LAST_TOKEN:
            last = (ops.cast(row_offsets[1:], DType.int64) - 1).rebind(kv.cache_lengths.shape)  # [B]
            return (logits(parameters, decode(parameters, tokens, cache, rows, last)),)
        # MAX says which rows; the final norm is part of `logits`.
        return logits_postprocess(
            decode(parameters, tokens, cache, rows, None),
            row_offsets,
            number_of_logits,
            lambda x: x,
            lambda x: logits(parameters, x),
            self.return_logits,
        )
