"""Attention of torch's tensors, by a library of kernels on torch's threads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.arrays.autograd_writes import mark_written
from paged_kv.arrays.dtypes import CACHE_DTYPES, dtype_of
from paged_kv.arrays.host import HOST
from paged_kv.arrays.pages import Pages, overlapping_pages
from paged_kv.call_layouts import ATTENTION, MASKS
from paged_kv.calls.attend import Attention, Scales, checked_sinks
from paged_kv.calls.plan import AttentionPlan, check_array, check_dtype
from paged_kv.calls.results import Results
from paged_kv.calls.rows import Rows
from paged_kv.kv_formats import FORMATS
from paged_kv.options import AttentionOptions, alibi_slopes, stored_elements
from paged_kv.runtime.libraries import kernel
from paged_kv.runtime.thread_pool import workers
from paged_kv.torch.memory import CacheLayout, holds, layout, output

_MOST_LAYOUTS = 64
"""Layouts of caches that one attention knows; with more it forgets them."""
_NO_SCALES: Scales = (None, None, None)
_DTYPE_NAMES = ("q", "cache")
_ROWS, _, _, _SLOPES, _SINKS, _OPTIONS, _ = ATTENTION.parts(
    "o lse q num_rows num_heads head_dim value_dim",
    "row_batch row_lengths",
    "masks",
    "slopes num_slopes",
    "sinks num_sinks",
    "window_left options",
    "cache",
)
_NO_MASKS = MASKS.zeros


class TensorAttention:
    """A plan over torch's tensors on the CPU, with the operands prepared that do not change; it keeps no cache alive.

    Threads may share one.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self._layouts: dict[tuple[Any, ...], CacheLayout] = {}
        self._general: Attention | None = None
        alibi = plan.pos_encoding_mode == "ALIBI"
        self._slopes = alibi_slopes(plan.num_qo_heads) if alibi else np.zeros(0, np.float32)
        self._numbers = plan.options.numbers(plan.head_dim)
        self._packed_slopes = _SLOPES.pack(self._slopes.ctypes.data, len(self._slopes))
        self._packed_options = _OPTIONS.pack(plan.options.window_left, self._numbers.ctypes.data)

    def over_pages(
        self,
        rows: Rows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """O `[R, Hq, D]` in q's dtype and the base-2 lse `[R, Hq]` float32, over K and V `[pages, page_size, Hk, D]`.

        O is written to `out` where that is given, which has its shape and no memory of another tensor.
        What dtypes, shapes and strides decide is checked in their first call; from then on a call checks what else may
        change: values, storage, the number of rows.

        Raises:
            ContractTypeError, ShapeError, ContractError: a tensor does not fit the plan.
            PageTableError: a page id of `rows` is not one of the cache's.
        """
        plan = self.plan
        of_cache = self._layout_of(rows, q, k, v)
        windowed = plan.options.window_left >= 0
        if (
            not rows.is_plain(windowed, plan.pos_encoding_mode)
            or not of_cache.held_by(k, v)
            or not holds(queries := q.contiguous(), queries.numel())
        ):
            o, lse = self._by_views(rows, q, k, v, sinks)
            return (o if out is None else out.copy_(o)), lse
        rows.table.check(k.shape[0])
        o = out if out is not None and _takes(out, queries) else torch.empty_like(queries)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        values = None if sinks is None else checked_sinks(HOST, sinks, plan.num_qo_heads, "num_qo_heads")
        if rows.count:
            at_sinks = (0, 0) if values is None else (values.ctypes.data, len(values))
            addresses, table = rows.addresses
            outputs = _ROWS.pack(
                output(o, q.dtype), output(lse, torch.float32), queries.data_ptr(), *q.shape, q.shape[2]
            )
            logits = self._packed_slopes + _SINKS.pack(*at_sinks) + self._packed_options
            if o is out:
                mark_written((o,))
            attend = kernel("attention", plan.q_dtype.name, plan.array_dtype.name, plan.q_dtype.name)
            attend(outputs + addresses + _NO_MASKS + logits + of_cache.storage(k, v) + table + workers())
        return (o if out is None or out is o else out.copy_(o)), lse

    def over_tokens(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`over_pages` over tokens that lie side by side, K and V `[N, Hk, D]`, where `rows.table` has pages that begin
        at every token.
        """
        page_size = rows.table.page_size
        return self.over_pages(rows, q, overlapping_pages(k, page_size), overlapping_pages(v, page_size), sinks)

    def _layout_of(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> CacheLayout:
        """The cache's, which is checked where it is new."""
        plan, page_size = self.plan, rows.table.page_size
        key = (q.dtype, q.shape[1:], page_size, *layout(k, v))
        cached = self._layouts.get(key)
        if cached is None or q.shape[0] != rows.count:
            shape = (rows.count, plan.num_qo_heads, plan.head_dim)
            pages = Pages.of((k, v), "NHD", "cache")
            check_array(HOST, "q", HOST.view(q, "q"), shape, plan.q_dtype, rows.counted_as)
            plan.check_pages(pages, page_size)
            cached = CacheLayout.of(k, v)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts = {}
            self._layouts[key] = cached
        return cached

    def _by_views(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same over NumPy's views, for rows with masks and tensors that are none of the ordinary."""
        if self._general is None:
            self._general = Attention(self.plan, keeps_storage=False)
        results = Results(return_lse=True)
        result: tuple[Tensor, Tensor] = self._general.over_pages(
            rows, q, (k, v), "NHD", _NO_SCALES, results, sinks=sinks
        )
        return result


def _takes(out: Tensor, o: Tensor) -> bool:
    """Return whether a kernel can write O to a tensor itself."""
    return out.dtype == o.dtype and out.shape == o.shape and out.is_contiguous() and holds(out, out.numel())


@lru_cache(maxsize=256)
def planned(
    sizes: tuple[int, int, int, int | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    options: tuple[float | None, int, float, bool],
) -> TensorAttention:
    """The attention of these query heads, KV heads, last dimension of the cache and page_size.

    Args:
        sizes: As said; the page_size is None for tokens that lie side by side.
        dtypes: The dtypes of q and of the cache.
        options: sm_scale, window_left, logits_soft_cap, and whether ALiBi's slopes are added.
    """
    sm_scale, window_left, logits_soft_cap, alibi = options
    q_dtype, kv_dtype = (dtype_of(dtype, name) for dtype, name in zip(dtypes, _DTYPE_NAMES, strict=True))
    kv_format = FORMATS.get(kv_dtype.name)
    if kv_format is not None:
        kv_dtype = CACHE_DTYPES[kv_format]
        sizes = (*sizes[:2], stored_elements(kv_format, sizes[2]), sizes[3])
    check_dtype(f"{_DTYPE_NAMES[0]}:", q_dtype)
    return TensorAttention(
        AttentionPlan(
            *sizes,
            q_dtype,
            kv_dtype,
            "ALIBI" if alibi else "NONE",
            AttentionOptions(sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap),
            dtype_names=_DTYPE_NAMES,
        )
    )
