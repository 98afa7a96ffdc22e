"""Attention over several levels of shared tokens: FlashInfer's class, as `cascade.py` says; import it from there."""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import flag, integer
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_layout, paged_views
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayT, DTypeLike, PagedCache, SupportsDLPack
from paged_kv.calls.level_buffers import LevelBuffers
from paged_kv.calls.level_call import LevelAttention
from paged_kv.calls.levels import NAMES, Level, Levels, level_arrays
from paged_kv.calls.plan import AttentionPlan, attention_options, dtypes_of
from paged_kv.calls.planned import LastPlan

MAX_LEVELS = 64


class MultiLevelCascadeAttentionWrapper:
    """Attention of query rows whose contexts have parts in common, each of which is read from memory once for all rows.

    A level divides the rows into groups, and a group has tokens of its own in pages of one cache. A row's context is
    the tokens of its groups, from the first level to the last: a system prompt, a document, a conversation. Positions
    count over the whole context, so that the result is that of one flat context for every row, under RoPE, ALiBi and
    windows too (FlashInfer's restart in each level). A row is one of the last tokens of its group in the last level.

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
        check_layout(kv_layout)
        self._kv_layout = kv_layout
        self._num_levels = integer("num_levels", num_levels, 1, MAX_LEVELS)
        buffers = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        fixed = LevelBuffers(self._num_levels, buffers) if flag("use_cuda_graph", use_cuda_graph) else None
        self._last_plan = LastPlan(Levels.rows, fixed)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether what is planned lives in the user's buffers."""
        return self._last_plan.buffers is not None

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
            causal: Whether a row sees no token behind its own; only in the last level are there any.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            use_fp16_qk_reduction: Accepted, without effect: scores are float32.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            window_left: Keeps the tokens from `window_left` before a row's own; -1 keeps all.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            rope_scale: Divides the rotary frequencies; None is 1.
            rope_theta: Base of the rotary embedding; None is 1e4.
            q_data_type: Of q: float32, float16, bfloat16 or either float8.
            kv_data_type: Of the cache; None is `q_data_type`. As in decode.
            o_data_type: Of o; None is `q_data_type`. FlashInfer has it not.

        Raises:
            ShapeError: a list has not one array a level, the levels have not as many rows, or the arrays of a level do
                not fit each other, or the user's buffers.
            PageTableError: levels do not nest, or a page table is inconsistent. A page id that is not one of the
                cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).

        Nothing changes, the former plan included, if an error is raised.
        """
        flag("use_fp16_qk_reduction", use_fp16_qk_reduction)
        q_dtype, kv_dtype = dtypes_of(q_data_type, kv_data_type, None)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            o_dtype=None if o_data_type is None else dtype_of(o_data_type, "o_data_type"),
        )
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        levels = [Level.of(arrays, page_size, names) for arrays, names in level_arrays(self._num_levels, lists, NAMES)]
        self._last_plan.replace(LevelAttention(plan), Levels(tuple(levels), flag("causal", causal)))

    begin_forward = plan

    def run(self, q: ArrayT, paged_kv_cache: PagedCache, *, return_lse: bool = False) -> Any:
        """Attention of the planned query rows.

        Args:
            q: `[T, Hq, D]`, of the planned dtype.
            paged_kv_cache: Of all levels: `[pages, 2, page_size, Hk, D]` (NHD) or `[pages, 2, Hk, page_size, D]` (HND),
                or a tuple (k, v) of such arrays without the 2, of the planned dtype.
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
        wants_lse = flag("return_lse", return_lse)
        device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache)
        view = device.view(q, "q")
        k, v = paged_views(paged_kv_cache, self._kv_layout, device=device)
        assert isinstance(attention, LevelAttention)
        o, lse = attention.merged(device, attention.states(levels, device, view, k, v))
        result = device.like(q, o)
        return (result, device.like(q, lse)) if wants_lse else result

    forward = run

    def end_forward(self) -> None:
        """Accepted, without effect."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._kv_layout}, {self._last_plan})"
