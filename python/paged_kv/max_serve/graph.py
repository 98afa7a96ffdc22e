"""The step that MAX Serve runs: its inputs and outputs around this package's decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from paged_kv.graphs.models.decoder import DeviceStep, decode, logits
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import PagedCache


@dataclass(frozen=True)
class ServedStep:
    """One step as MAX's pipelines trace it: ragged tokens and a paged cache -> logits."""

    config: DecoderConfig
    dtype: DType
    kv_params: KVCacheParamInterface
    devices: Sequence[DeviceRef]
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
                int64, of several devices a buffer each for their sums, and the leaves of the cache's inputs.

        Outputs are float32: the logits after each request's last token `[B, vocab]`; where `return_logits` says so,
        also those of more tokens `[N, vocab]` and their offsets.
        """
        with Graph(
            name,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        ) as graph:
            tokens, row_offsets, number_of_logits, *others = graph.inputs
            signals = [value.buffer for value in others[: self._signals]]
            kv_inputs = self.kv_params.unflatten_kv_inputs(iter(others[self._signals :]))
            caches = tree.leaves(kv_inputs, leaf=KVCacheInputsPerDevice)
            steps = self._steps(graph, tokens.tensor, row_offsets.tensor, caches)
            (x, *_) = decode(steps, lambda parts: ops.allreduce.sum(parts, signals) if signals else parts)
            graph.output(*self._outputs(steps[0].parameters, x, row_offsets.tensor, number_of_logits.tensor))
        return graph

    @property
    def _signals(self) -> int:
        """The number of MAX's buffers for sums over devices."""
        return len(self.devices) if len(self.devices) > 1 else 0

    def _steps(
        self, graph: Graph, tokens: TensorValue, row_offsets: TensorValue, caches: Sequence[Any]
    ) -> list[DeviceStep]:
        shares = Parameters.shares(graph, self.config, self.dtype, self.devices)
        steps = []
        for parameters, kv, device in zip(shares, caches, self.devices, strict=True):
            here, offsets = tokens.to(device), row_offsets.to(device)
            rows = StepRows.of(offsets, kv.cache_lengths, here)
            last = rows.last if self.return_logits == ReturnLogits.LAST_TOKEN else None
            steps.append(DeviceStep(parameters, here, PagedCache.of(kv.kv_blocks, kv.lookup_table), rows, last))
        return steps

    def _outputs(
        self, parameters: Parameters, x: TensorValue, row_offsets: TensorValue, number_of_logits: TensorValue
    ) -> tuple[TensorValue, ...]:
        if self.return_logits == ReturnLogits.LAST_TOKEN:
            return (logits(parameters, x),)
        # MAX says which rows; the final norm is part of `logits`.
        return logits_postprocess(
            x, row_offsets, number_of_logits, lambda y: y, lambda y: logits(parameters, y), self.return_logits
        )
