"""Attention over one prefix that all requests share and pages of their own: FlashInfer's two classes, as `cascade.py`
says; import them from there.

The prefix lies in two contiguous arrays, and is read once for all rows. Letters in shapes: B requests, T query rows, P
tokens of the prefix, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import flag
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_alike, check_layout, check_storage, paged_views
from paged_kv.arrays.types import ArrayDevice, ArrayT, DTypeLike, PagedCache, SupportsDLPack
from paged_kv.calls.level_call import LevelAttention
from paged_kv.calls.levels import Level, LevelRows, Levels
from paged_kv.calls.plan import AttentionPlan, attention_options, dtypes_of
from paged_kv.calls.rows import LookupTable, Rows
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

_UNIQUE_NAMES = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len")
_PAGED_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_HEADS = ("num_kv_heads", "head_dim")
_VARIANTS = ("independent", "equal")


class _SharedPrefix:
    """What the two classes have in common."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        del float_workspace_buffer
        check_layout(kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def end_forward(self) -> None:
        """Accepted, without effect, as in FlashInfer."""

    def _prefix(self, device: ArrayDevice, k_shared: Any, v_shared: Any) -> tuple[Any, Any]:
        """The prefix as one page of all its tokens, `[1, P, Hk, D]`; as no page, `[0, 1, Hk, D]`, where P = 0."""
        k, v = device.view(k_shared, "k_shared"), device.view(v_shared, "v_shared")
        check_storage(device, k, "k_shared", 3)
        check_storage(device, v, "v_shared", 3)
        check_alike(v, k, "v_shared", "k_shared's")
        if self._kv_layout == "HND":
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        if len(k) == 0:
            return k.reshape(0, 1, *k.shape[1:]), v.reshape(0, 1, *v.shape[1:])
        return k[None], v[None]

    def _attend(self, call: _Call, rows: LevelRows, q: Any, k_shared: Any, v_shared: Any, cache: Any) -> Any:
        """The prefix and the requests' own tokens, merged, in the kind of q."""
        device = devices.device_of(q=q, k_shared=k_shared, v_shared=v_shared, unique_kv_cache=cache)
        queries = device.view(q, "q")
        k, v = self._prefix(device, k_shared, v_shared)
        call.check_prefix(k, device.dtype(k))
        unique = paged_views(cache, self._kv_layout, "unique_kv_cache", device=device)
        length = k.shape[1] if len(k) else 0
        own = call.own.states(rows, device, queries, *unique)
        shared = call.shared.states(_of_prefix(length, rows.num_rows), device, queries, k, v)
        o, _ = call.own.merged(device, [*shared, *own])
        return device.like(q, o)


class _Call:
    """A plan's two attentions: over the prefix, and over the requests' own pages."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.shared, self.own = LevelAttention(plan), LevelAttention(plan)

    def check_prefix(self, k: Any, dtype: np.dtype[Any]) -> None:
        """Refuses a prefix, `[pages, slots, Hk, D]`, of other sizes or another dtype than planned."""
        plan = self.plan
        if dtype != plan.kv_dtype:
            raise ContractTypeError(f"k_shared: dtype {dtype.name}, planned {plan.kv_dtype.name}")
        for what, found, planned in zip(_HEADS, k.shape[2:], (plan.num_kv_heads, plan.head_dim), strict=True):
            if found != planned:
                raise ShapeError(f"k_shared: {what} is {found}, planned {planned}")


def _of_prefix(length: int, num_rows: int) -> LevelRows:
    """Rows that all see the `length` tokens of one page."""
    zeros = np.zeros(num_rows, np.int32)
    return LevelRows(Rows(LookupTable.of_one(length), zeros, np.full(num_rows, length, np.int32), counted_as="T"), 1)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Attention of one query token a request over a prefix that all requests share, and pages of each.

    `MultiLevelCascadeAttentionWrapper` does the same for prefixes in pages, any number of them.

    Args:
        float_workspace_buffer: Accepted, not kept. May be None.
        kv_layout: "NHD" or "HND", of the prefix and of the cache.

    Raises:
        ContractError: the layout is unknown.
    """

    _planned: tuple[_Call, LevelRows] | None = None

    def begin_forward(
        self,
        unique_kv_indptr: SupportsDLPack,
        unique_kv_indices: SupportsDLPack,
        unique_kv_last_page_len: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DTypeLike = "float16",
    ) -> None:
        """Fixes the requests. The arrays lie on the host and are copied.

        Args:
            unique_kv_indptr: `[B + 1]`, from 0: request b owns `unique_kv_indices[indptr[b]:indptr[b + 1]]`.
            unique_kv_indices: `[indptr[B]]` page ids.
            unique_kv_last_page_len: `[B]`: tokens in each request's last page.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            data_type: Of the prefix and the cache, and of q; with either float8, q is float16.

        Raises:
            PageTableError: the page table is inconsistent.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).
        """
        q_dtype, kv_dtype = dtypes_of("float16", None, data_type)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            pos_encoding_mode="NONE",
            options=attention_options(-1, None, None, None, None),
            dtype_names=("data_type", "data_type"),
            cache_name="unique_kv_cache",
        )
        arrays = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        level = Level.of_single_rows(arrays, page_size, _UNIQUE_NAMES)
        self._planned = _Call(plan), Levels((level,), True).rows()

    def forward(
        self, q: ArrayT, k_shared: SupportsDLPack, v_shared: SupportsDLPack, unique_kv_cache: PagedCache
    ) -> ArrayT:
        """Attention of the planned requests.

        Args:
            q: `[B, Hq, D]`, of the planned dtype.
            k_shared, v_shared: `[P, Hk, D]` (NHD) or `[Hk, P, D]` (HND), of the planned dtype; they need not be
                contiguous, but their last stride is 1.
            unique_kv_cache: As `paged_kv_cache` of `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            o `[B, Hq, D]` in the dtype of `q`; 0 for a request without tokens where P = 0.

        Raises:
            ContractError: nothing was planned.
            PageTableError: a page id is not one of the cache's.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        planned = self._planned
        if planned is None:
            raise ContractError("forward: nothing is planned, call begin_forward first")
        return self._attend(*planned, q, k_shared, v_shared, unique_kv_cache)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Attention of several query tokens a request over a prefix that all requests share, and pages of each.

    `MultiLevelCascadeAttentionWrapper` does the same for prefixes in pages, any number of them.

    Args:
        float_workspace_buffer: Accepted, not kept. May be None.
        kv_layout: "NHD" or "HND", of the prefix and of the cache.

    Raises:
        ContractError: the layout is unknown.
    """

    _planned: tuple[tuple[int, int, int, int], dict[bool, LevelRows]] | None = None
    _last: _Call | None = None

    def begin_forward(
        self,
        qo_indptr: SupportsDLPack,
        paged_kv_indptr: SupportsDLPack,
        paged_kv_indices: SupportsDLPack,
        paged_kv_last_page_len: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Fixes the requests. The arrays lie on the host and are copied. Dtypes are those that `forward` gets.

        Args:
            qo_indptr: `[B + 1]`, from 0: request b has the query rows `qo_indptr[b]:qo_indptr[b + 1]`.
            paged_kv_indptr: `[B + 1]`, from 0: request b owns `paged_kv_indices[indptr[b]:indptr[b + 1]]`.
            paged_kv_indices: `[indptr[B]]` page ids.
            paged_kv_last_page_len: `[B]`: tokens in each request's last page.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.

        Raises:
            PageTableError: the page table is inconsistent.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).
        """
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        _plan(sizes, np.dtype(np.float16), np.dtype(np.float16), None, None, None)  # checks the sizes
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        level = Level.of(arrays, page_size, _PAGED_NAMES)
        self._planned = sizes, {causal: Levels((level,), causal).rows() for causal in (False, True)}

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted, without effect: one kernel takes K and V of any strides.

        Raises:
            ContractError: `variant` is neither "independent" nor "equal".
        """
        if variant not in _VARIANTS:
            raise ContractError(f"variant must be one of {', '.join(_VARIANTS)}, not {variant!r}")

    def forward(
        self,
        q: ArrayT,
        k_shared: SupportsDLPack,
        v_shared: SupportsDLPack,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> ArrayT:
        """Attention of the planned requests' rows.

        Args:
            q: `[T, Hq, D]`: float32, float16, bfloat16 or either float8.
            k_shared, v_shared: `[P, Hk, D]` (NHD) or `[Hk, P, D]` (HND), in the dtype of q, or float8; they need not
                be contiguous, but their last stride is 1.
            unique_kv_cache: As `paged_kv_cache` of `BatchDecodeWithPagedKVCacheWrapper.run`; of `k_shared`'s dtype.
            causal: Whether a row sees no token of its request behind its own: the rows are the request's last tokens.
            use_fp16_qk_reduction: Accepted, without effect: scores are float32.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            rope_scale, rope_theta: Without effect, as in FlashInfer: there is no rotary embedding.

        Returns:
            o `[T, Hq, D]` in the dtype of `q`; 0 for a row that sees no token.

        Raises:
            ContractError: nothing was planned, or a number is out of range.
            PageTableError: a page id is not one of the cache's.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        planned = self._planned
        if planned is None:
            raise ContractError("forward: nothing is planned, call begin_forward first")
        flag("use_fp16_qk_reduction", use_fp16_qk_reduction)
        sizes, rows = planned
        device = devices.device_of(q=q, k_shared=k_shared)
        q_dtype, kv_dtype = device.dtype(device.view(q, "q")), device.dtype(device.view(k_shared, "k_shared"))
        plan = _plan(sizes, q_dtype, kv_dtype, sm_scale, rope_scale, rope_theta)
        last = self._last
        if last is None or last.plan != plan:
            last = self._last = _Call(plan)
        return self._attend(last, rows[flag("causal", causal)], q, k_shared, v_shared, unique_kv_cache)


def _plan(
    sizes: tuple[int, int, int, int],
    q_dtype: np.dtype[Any],
    kv_dtype: np.dtype[Any],
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> AttentionPlan:
    """The plan of one prefill."""
    num_qo_heads, num_kv_heads, head_dim, page_size = sizes
    return AttentionPlan(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        pos_encoding_mode="NONE",
        options=attention_options(-1, None, sm_scale, rope_scale, rope_theta),
        dtype_names=("q: dtype", "k_shared: dtype"),
        cache_name="unique_kv_cache",
    )
