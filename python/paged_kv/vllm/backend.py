"""The backend that vLLM's CPU is given: attention over its cache, appends to it, linear layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

import paged_kv.torch  # the operators  # noqa: F401
from paged_kv.calls.kv_copy import Slots
from paged_kv.calls.ragged import RaggedBatch
from paged_kv.calls.remembered_plan import RememberedPlan
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError
from paged_kv.torch.attention import planned
from paged_kv.torch.cache import append, checked_append

_LEAST_ELEMENTS = 1 << 16
_STEP = "_paged_kv_step"

_dispatch = utils.dispatch_cpu_unquantized_gemm


class PagedBackend(CPUAttentionBackend):  # type: ignore[misc] # vLLM is installed only where it is used
    """The backend of vLLM's CPU, `CPU_ATTN`."""

    @staticmethod
    def get_impl_cls() -> Any:
        return PagedAttention


class StepRequests:
    """The requests of a step: what its layers share, made by the first of them."""

    def __init__(self, metadata: CPUAttentionMetadata) -> None:
        self._metadata = metadata
        self._rows: dict[int, Rows] = {}

    @staticmethod
    def of(metadata: CPUAttentionMetadata) -> StepRequests:
        """That of vLLM's facts of a step, on which it is kept."""
        step: StepRequests | None = getattr(metadata, _STEP, None)
        if step is None:
            step = StepRequests(metadata)
            setattr(metadata, _STEP, step)
        return step

    def rows(self, page_size: int) -> Rows:
        """The query rows over pages of this size."""
        rows = self._rows.get(page_size)
        if rows is None:
            metadata = self._metadata
            if metadata.dynamic_causal is not None:
                raise ContractError("paged_kv.vllm: rows that are causal for some requests alone are not served")
            offsets, lengths = (
                array.numpy().astype(np.int32) for array in (metadata.query_start_loc, metadata.seq_lens)
            )
            widest = max(1, -(-int(lengths.max(initial=0)) // page_size))
            table = Table.padded(metadata.block_table[:, :widest], lengths, page_size, ("block_table",) * 3)
            rows = self._rows[page_size] = RaggedBatch(offsets, table, None, metadata.causal).rows
        return rows


class PagedAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer, and what it appends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served = (
            self.attn_type == AttentionType.DECODER and not self.is_fp8_kv_cache and self.alibi_slopes is None
        )
        self._options = float(self.scale), max(self.sliding_window - 1, -1), float(self.logits_soft_cap), False
        self._cache: tuple[Tensor | None, tuple[Tensor, Tensor] | None] = None, None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Query rows `[T, Hq, D]` over the pages of their requests, into `output`."""
        if attn_metadata is None or not self._served:
            rest = output_scale, output_block_scale
            result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest)
            return result
        if output_scale is not None or output_block_scale is not None:
            raise ContractError("output_scale: paged_kv.vllm computes no quantised outputs")
        count = attn_metadata.num_actual_tokens
        k_cache, v_cache = self._pages(kv_cache)
        page_size, kv_heads, head_dim = k_cache.shape[1:]
        rows = StepRequests.of(attn_metadata).rows(page_size)
        attention = planned(
            (self.num_heads, kv_heads, head_dim, page_size), (query.dtype, kv_cache.dtype), self._options
        )
        o = output[:count].view(count, self.num_heads, head_dim)
        attention.over_pages(rows, query[:count], k_cache, v_cache, self.sinks, out=o)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """New K and V `[T, Hk, D]` into their slots."""
        if not self._served:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        k_cache, v_cache = self._pages(kv_cache)
        slots = _slots.of((k_cache.shape[1],), slot_mapping=slot_mapping)
        count = len(slots.pages)
        new_k, new_v = key[:count], value[:count]
        append(new_k, new_v, k_cache, v_cache, checked_append(new_k, new_v, k_cache, v_cache), slots)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V `[pages, page_size, Hk, D]` of vLLM's `[blocks, Hk, block_size, 2 D]`, in an order of our own."""
        seen, views = self._cache
        if views is None or seen is not kv_cache:
            pages = kv_cache.transpose(1, 2)
            views = pages[..., : self.head_size], pages[..., self.head_size :]
            self._cache = kv_cache, views
        return views


def dispatch_linear(layer: Any, remove_weight: bool) -> None:
    """Choose how vLLM's CPU computes a linear layer: this package's kernels for bfloat16, else as vLLM chooses."""
    weight: Any = layer.weight
    if (
        weight.is_meta
        or weight.ndim != 2
        or weight.dtype != torch.bfloat16
        or weight.numel() < _LEAST_ELEMENTS
        or not weight.is_contiguous()
        or torch.cpu._is_amx_tile_supported()
    ):
        _dispatch(layer, remove_weight)
        return
    layer.cpu_linear = _linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.ops.paged_kv.linear(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def _new_slots(page_size: int, slot_mapping: Tensor) -> Slots:
    return Slots.mapped(slot_mapping.numpy(), page_size)


_slots = RememberedPlan(_new_slots)
