"""Attention over shared parts of contexts: the names, argument order and meaning of FlashInfer's `cascade` module.

The wrappers attend to each shared part once and merge the states; the functions below merge states of any origin.

A state is what attention over one set of keys gives: the output `v` and the base-2 logarithm `s` of the softmax's
denominator, float32. States over disjoint sets of keys merge into the state over their union. A state with
`s = -inf` has seen no key: its `v` is ignored, whatever it holds, NaN included.

Any array on the CPU comes in, and torch and MAX arrays on one GPU; results have the kind of the first argument and lie
beside it. Sums are float32; an lse of +inf or NaN makes its row NaN.
Letters in shapes: L levels, G groups of a level, T query rows, P tokens of a shared prefix, B requests; S rows, n
states; Hq query heads (H: of a state), Hk KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer, one_of
from paged_kv.arrays import devices
from paged_kv.arrays.autograd_writes import mark_written, refuse_gradients
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.overlap import check_written
from paged_kv.arrays.pages import Pages, check_alike, check_layout, token_views
from paged_kv.arrays.types import ArrayT, CacheArrays, DTypeLike, SupportsDLPack
from paged_kv.calls.buffers import Buffer, FixedBuffers
from paged_kv.calls.levels import NAMES, Level, LevelAttention, LevelRows, Levels, level_arrays
from paged_kv.calls.merge_states import checked_mask, checked_state, merge, merge_two
from paged_kv.calls.plan import AttentionPlan, attention_options, plan_dtypes
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.results import Results
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.flashinfer.wrapper import PlannedWrapper

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

MAX_LEVELS = 64

_BUFFER_LISTS = (
    "qo_indptr_buf_arr",
    "paged_kv_indptr_buf_arr",
    "paged_kv_indices_buf_arr",
    "paged_kv_last_page_len_buf_arr",
)
_EXTRA = (1, 1, None, 0)  # `Buffer.extra` of each
_UNIQUE_NAMES = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len")
_PAGED_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_HEADS = ("num_kv_heads", "head_dim")


class MultiLevelCascadeAttentionWrapper(PlannedWrapper[LevelAttention, Levels, LevelRows]):
    """Attention of query rows whose contexts have parts in common, each of which is read from memory once for all rows.

    A level divides the rows into groups, and a group has tokens of its own in pages of one cache. A row's context is
    the tokens of its groups, from the first level to the last: a system prompt, a document, a conversation. Positions
    count over the whole context, so that the result is that of one flat context for every row, under RoPE, ALiBi and
    windows too (FlashInfer's restart in each level). The rows of a group of the last level are its last tokens; where
    it has fewer, the first rows stand in the levels above, or before all tokens.

    Threads may share a wrapper. A run follows one plan whole: the one in force when it began. The user's buffers below
    are the exception: while other code writes to them, or another wrapper over the same ones plans, no run may begin.

    Args:
        num_levels: L, from 1 to 64.
        float_workspace_buffer: Accepted, not kept. May be None.
        kv_layout: "NHD" or "HND", of the caches that `run` gets.
        use_cuda_graph: Keeps what is planned in the buffers below, each a list of one array a level, of whatever kind:
            the numbers of rows and groups are then fixed, `plan` copies into them and `run` reads them again each time.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr: `[G + 1]` int32 or int64 each.
        paged_kv_indices_buf_arr: int32 or int64, each long enough for the most page indices of the level.
        paged_kv_last_page_len_buf_arr: `[G]` int32 or int64 each.

    Raises:
        ContractError: the number of levels is out of range, the layout is unknown; a buffer is missing, cannot be
            written, or shares memory with itself or another one.
        ContractTypeError: a buffer is no array of these dtypes.
        ShapeError: a list has not one array a level, a buffer is not 1-D, or lengths do not fit each other.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[SupportsDLPack] | None = None,
        paged_kv_indptr_buf_arr: list[SupportsDLPack] | None = None,
        paged_kv_indices_buf_arr: list[SupportsDLPack] | None = None,
        paged_kv_last_page_len_buf_arr: list[SupportsDLPack] | None = None,
    ) -> None:
        del float_workspace_buffer
        self._num_levels = integer("num_levels", num_levels, 1, MAX_LEVELS)
        fixed: FixedBuffers[Levels, LevelRows] | None = None
        if flag("use_cuda_graph", use_cuda_graph):
            lists = (
                qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr,
            )
            fixed = _level_buffers(self._num_levels, lists)
        super().__init__(kv_layout, LastPlan(fixed))

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def plan(
        self,
        qo_indptr_arr: list[SupportsDLPack],
        paged_kv_indptr_arr: list[SupportsDLPack],
        paged_kv_indices_arr: list[SupportsDLPack],
        paged_kv_last_page_len: list[SupportsDLPack],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        *,
        o_data_type: DTypeLike | None = None,
    ) -> None:
        """Fixes the levels and everything else that the runs to come share. The arrays lie on the host and are copied.

        Args:
            qo_indptr_arr: For each level `[G + 1]`, from 0: group g of the level has the query rows
                `qo_indptr[g]:qo_indptr[g + 1]`. Any integer dtype. All end at T, and a group of a level is whole groups
                of the next.
            paged_kv_indptr_arr: For each level `[G + 1]`, from 0: group g has the pages
                `indices[indptr[g]:indptr[g + 1]]`; none where its level has no tokens for it.
            paged_kv_indices_arr: For each level its page ids.
            paged_kv_last_page_len: For each level `[G]`: tokens in each group's last page.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            causal: Whether a row sees no token behind its own, in whatever level.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            use_fp16_qk_reduction: Accepted, without effect: scores are float32.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            window_left: Keeps the tokens from `window_left` before a row's own; -1 keeps all.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            rope_scale: Divides the rotary frequencies; None is 1.
            rope_theta: Base of the rotary embedding; None is 1e4.
            q_data_type: The dtype of q: float32, float16, bfloat16 or either float8.
            kv_data_type: The dtype of the cache; None is `q_data_type`. As in decode.
            o_data_type: The dtype of o; None is `q_data_type`. FlashInfer has it not.

        Raises:
            ShapeError: a list has not one array a level, the levels have not as many rows, or the arrays of a level do
                not fit each other, or the user's buffers.
            PageTableError: levels do not nest, or a page table is inconsistent. A page id that is not one of the
                cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).

        Nothing changes, the former plan included, if an error is raised.
        """
        flag("use_fp16_qk_reduction", use_fp16_qk_reduction)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            **plan_dtypes(q_data_type, kv_data_type, o_data_type),
        )
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        levels = [Level.of(arrays, page_size, names) for arrays, names in level_arrays(self._num_levels, lists, NAMES)]
        self._last_plan.replace(LevelAttention(plan), Levels(tuple(levels), flag("causal", causal)))

    begin_forward = plan

    def run(self, q: ArrayT, paged_kv_cache: CacheArrays, *, return_lse: bool = False) -> Any:
        """Attention of the planned query rows.

        Args:
            q: `[T, Hq, D]`, of the planned dtype.
            paged_kv_cache: The one cache of all levels: `[pages, 2, page_size, Hk, D]` (NHD) or `[pages, 2, Hk,
                page_size, D]` (HND), or a tuple (k, v) of such arrays without the 2, of the planned dtype.
            return_lse: Whether to return the lse as well. FlashInfer has it not.

        Returns:
            o `[T, Hq, D]` in the planned dtype, or o and the base-2 lse `[T, Hq]` float32. A row that sees no token has
            o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned.
            PageTableError: a page id is not one of the cache's, or the user's buffers hold inconsistent levels.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        attention, levels = self._last_plan.of_call("run")
        results = Results(return_lse)
        device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache)
        view = device.view(q, "q")
        pages = Pages.of(paged_kv_cache, self._kv_layout, device=device)
        o, lse = attention.merged(device, attention.states(levels, view, pages))
        return results.hand_back(device, q, o, lse)

    forward = run


def _level_buffers(num_levels: int, lists: Sequence[Any]) -> FixedBuffers[Levels, LevelRows]:
    """The user's lists of arrays, one of each for each level.

    Raises:
        ContractError, ContractTypeError, ShapeError: as `FixedBuffers`, and where a list is missing or not of L.
    """
    for name, entries in zip(_BUFFER_LISTS, lists, strict=True):
        if entries is None:
            raise ContractError(
                f"{name}: expected a list of arrays where the levels live in buffers (use_cuda_graph=True), got None"
            )
    by_level = level_arrays(num_levels, lists, _BUFFER_LISTS)
    for arrays, names in by_level:
        for array, name in zip(arrays, names, strict=True):
            if array is None:
                raise ContractError(f"{name}: expected an array, got None")
    groups = [[Buffer(name, extra=extra) for name, extra in zip(names, _EXTRA, strict=True)] for _, names in by_level]
    return FixedBuffers(groups, [array for arrays, _ in by_level for array in arrays], "the levels live")


class _SharedPrefix:
    """Base of the two classes."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        del float_workspace_buffer
        check_layout(kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def end_forward(self) -> None:
        """Accepted, without effect, as in FlashInfer."""

    def _attend(self, call: _PrefixAttention, rows: LevelRows, q: Any, k_shared: Any, v_shared: Any, cache: Any) -> Any:
        """The prefix and the requests' own tokens, merged, in the kind of q."""
        device = devices.device_of(q=q, k_shared=k_shared, v_shared=v_shared, unique_kv_cache=cache)
        queries = device.view(q, "q")
        k, v = token_views(device, (k_shared, v_shared), self._kv_layout, ("k_shared", "v_shared"))
        prefix = Pages.of_one(k, v, device, "k_shared")
        call.check_prefix(prefix)
        unique = Pages.of(cache, self._kv_layout, "unique_kv_cache", device=device)
        own = call.own.states(rows, queries, unique)
        shared = call.shared.states(_of_prefix(len(k), rows), queries, prefix)
        o, _ = call.own.merged(device, [*shared, *own])
        return device.like(q, o)


class _PrefixAttention:
    """A plan's two attentions: over the prefix, and over the requests' own pages."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.shared, self.own = LevelAttention(plan), LevelAttention(plan)

    def check_prefix(self, prefix: Pages) -> None:
        """Refuses a prefix of other sizes or another dtype than planned."""
        plan = self.plan
        if prefix.dtype != plan.kv_dtype:
            raise ContractTypeError(
                f"k_shared: expected the planned dtype {plan.kv_dtype.name}, got {prefix.dtype.name}"
            )
        for what, size, planned in zip(_HEADS, prefix.k.shape[2:], (plan.num_kv_heads, plan.head_dim), strict=True):
            if size != planned:
                raise ShapeError(f"k_shared: expected the planned {what} {planned}, got {size}")


def _of_prefix(length: int, own: LevelRows) -> LevelRows:
    """The rows over the `length` tokens of one page, which come before their own."""
    positions = own.positions.astype(np.int64) + length
    if max(length, positions.max(initial=0)) > LARGEST_INDEX:
        raise ShapeError(f"k_shared: its {length} tokens and the longest request's own are over 2^31 - 1")
    seen = np.clip(positions + 1, 0, length) if own.causal else np.full_like(positions, length)
    batch = np.zeros(len(positions), np.int32)
    rows = Rows(Table.of_one(length), batch, seen.astype(np.int32), counted_as="T")
    return LevelRows(rows, positions.astype(np.int32), own.causal, 1)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Attention of one query token a request over a prefix that all requests share, and pages of each.

    `MultiLevelCascadeAttentionWrapper` does the same for prefixes in pages, any number of them.

    Args:
        float_workspace_buffer: Accepted, not kept. May be None.
        kv_layout: "NHD" or "HND", of the prefix and of the cache.

    Raises:
        ContractError: the layout is unknown.
    """

    _planned: tuple[_PrefixAttention, LevelRows] | None = None

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
            data_type: The dtype of the prefix and the cache, and of q; with either float8, q is float16.

        Raises:
            PageTableError: the page table is inconsistent.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).
        """
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pos_encoding_mode="NONE",
            options=attention_options(-1, None, None, None, None),
            dtype_names=("data_type", "data_type"),
            **plan_dtypes("float16", data_type=dtype_of(data_type, "data_type")),
        )
        arrays = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        level = Level.of_single_rows(arrays, page_size, _UNIQUE_NAMES)
        self._planned = _PrefixAttention(plan), Levels((level,), True).requests()

    def forward(
        self, q: ArrayT, k_shared: SupportsDLPack, v_shared: SupportsDLPack, unique_kv_cache: CacheArrays
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
    _last: _PrefixAttention | None = None

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
        self._planned = sizes, {causal: Levels((level,), causal).requests() for causal in (False, True)}

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted, without effect: one kernel takes K and V of any strides.

        Raises:
            ContractError: `variant` is neither "independent" nor "equal".
        """
        one_of("variant", variant, ("independent", "equal"))

    def forward(
        self,
        q: ArrayT,
        k_shared: SupportsDLPack,
        v_shared: SupportsDLPack,
        unique_kv_cache: CacheArrays,
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
            causal: Whether a row sees no token behind its own: the rows are the request's last tokens. With more rows
                than own tokens, the first ones stand in the prefix, or before it.
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
            last = self._last = _PrefixAttention(plan)
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
    )


def merge_state(v_a: ArrayT, s_a: SupportsDLPack, v_b: SupportsDLPack, s_b: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges two states, as FlashInfer's `merge_state`.

    Args:
        v_a, v_b: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s_a, s_b: `[S, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v_a` and s `[S, H]` float32; 0 and -inf where both sides are empty.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
    """
    device = devices.device_of(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    a = checked_state(device, v_a, s_a, ("v_a", "s_a"), rank=3)
    b = checked_state(device, v_b, s_b, ("v_b", "s_b"), rank=3)
    check_alike(b[0], a[0], "v_b", "v_a's")
    v, s = merge_two(device, a, b)
    return device.like(v_a, v), device.like(v_a, s)


def merge_state_in_place(
    v: SupportsDLPack,
    s: SupportsDLPack,
    v_other: SupportsDLPack,
    s_other: SupportsDLPack,
    mask: SupportsDLPack | None = None,
) -> None:
    """Merges a second state into `(v, s)`, in place, as FlashInfer's `merge_state_in_place`.

    Args:
        v, v_other: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s, s_other: `[S, H]` float32, base 2.
        mask: `[S]` bool: only rows where it is true are merged, the others keep their bits; None merges all.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes, or `v` or `s` requires a gradient.
        ContractError: `v` or `s` cannot be written, or shares memory with another argument or within itself.
    """
    device = devices.device_of(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    refuse_gradients(v=v, s=s)
    ours = checked_state(device, v, s, ("v", "s"), rank=3)
    other = checked_state(device, v_other, s_other, ("v_other", "s_other"), rank=3)
    check_alike(other[0], ours[0], "v_other", "v's")
    rows = None if mask is None else checked_mask(device, mask, len(ours[0]))
    for name, view in zip(("v", "s"), ours, strict=True):
        if not device.is_writable(view):
            raise ContractError(f"{name} is read-only, and is to be changed in place")
    read = [("v_other", other[0]), ("s_other", other[1]), *([] if rows is None else [("mask", rows)])]
    check_written(device, [("v", ours[0]), ("s", ours[1])], read)
    mark_written((v, s))
    for view, merged in zip(ours, merge_two(device, ours, other), strict=True):
        chosen = merged
        if rows is not None:
            chosen = device.select(rows.reshape(-1, *[1] * (view.ndim - 1)), merged, view)
        device.write(view, chosen)


def merge_states(v: ArrayT, s: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges `n` states at once, as FlashInfer's `merge_states`.

    Args:
        v: `[S, n, H, D]` float32, float16 or bfloat16. The states are the second dimension.
        s: `[S, n, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v` and s `[S, H]` float32; 0 and -inf where all states are empty, or n = 0.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.

    Examples:
        >>> import numpy as np
        >>> v = np.array([1, 4], np.float32).reshape(1, 2, 1, 1) * np.ones((1, 2, 1, 8), np.float32)
        >>> merged, s = merge_states(v, np.array([[[1.0], [0.0]]], np.float32))  # weights 2 and 1
        >>> merged[0, 0, 0].item(), round(s.item(), 3)
        (2.0, 1.585)
    """
    device = devices.device_of(v=v, s=s)
    merged_v, merged_s = merge(device, *checked_state(device, v, s, ("v", "s"), rank=4))
    return device.like(v, merged_v), device.like(v, merged_s)
