"""What the two batch prefill wrappers share: their buffers, plans and runs. `paged_prefill.py`, `ragged_prefill.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paged_kv.arguments import flag, integer
from paged_kv.arrays.cache_storage import check_layout
from paged_kv.arrays.types import SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.kernel_arguments import check_backend, is_sink_kernel, refuse_given
from paged_kv.calls.masks import packed_mask
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.plan import AttentionPlan, attention_options
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.ragged import RaggedBatch, TokenRanges, check_equals, row_offsets
from paged_kv.calls.ragged_buffers import RaggedBuffers
from paged_kv.calls.rows import Rows
from paged_kv.calls.scalars import one_number
from paged_kv.errors import ContractError, ContractTypeError

_WORKSPACE_BYTES = 16


class PrefillWrapper:
    """Attention of ragged query rows: what does not depend on where K and V lie.

    Threads may share a wrapper. A run follows one plan whole: the one in force when it began. The user's buffers of
    `use_cuda_graph` are the exception: while other code writes to them, or another wrapper over the same ones plans, no
    run may begin.
    """

    def __init__(
        self,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, SupportsDLPack | None],
        mask_buffers: Sequence[SupportsDLPack | None],
        backend: str,
        jit_args: Any,
        variant_owns_mask: bool,
    ) -> None:
        check_layout(kv_layout)
        check_backend(backend)
        self._takes_sinks = is_sink_kernel(jit_args)
        if flag("variant_owns_mask", variant_owns_mask):
            raise ContractError("variant_owns_mask must be False: there is no kernel of one's own (jit_args)")
        self._kv_layout = kv_layout
        fixed = None
        if flag("use_cuda_graph", use_cuda_graph):
            fixed = RaggedBuffers(tuple(buffers), tuple(buffers.values()), *mask_buffers)
        self._last_plan = LastPlan(RaggedBatch.requests, fixed)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the requests live in the user's buffers and the batch is fixed."""
        return self._last_plan.buffers is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes of float and of integer workspace that suffice for `plan` with these arguments.

        The wrapper uses none: it is one aligned unit of each.
        """
        del args, options
        return _WORKSPACE_BYTES, _WORKSPACE_BYTES

    def end_forward(self) -> None:
        """Accepted, without effect, as in FlashInfer."""

    def _replace_plan(
        self,
        plan: AttentionPlan,
        qo_indptr: Any,
        tokens: PageTable | TokenRanges,
        masks: tuple[Any, Any],
        causal: bool,
        seq_lens_q: Any,
        o_indptr: Any = None,
    ) -> None:
        """Plans anew what was not refused."""
        batch = RaggedBatch(row_offsets(qo_indptr, "qo_indptr"), tokens, None, flag("causal", causal))
        check_equals("seq_lens_q", seq_lens_q, batch.q_lengths, "qo_indptr")
        check_equals("o_indptr", o_indptr, batch.qo_indptr, "qo_indptr")
        mask = packed_mask(*masks, batch.q_lengths, tokens.lengths)
        self._last_plan.replace(Attention(plan), replace(batch, mask=mask))

    def _of_run(self, args: tuple[Any, ...], sinks: Any) -> tuple[Attention, Rows, Any]:
        """The plan, its rows and the sinks of a run; `args` are what it got by position after K and V."""
        given: Any = None
        sm_scale: Any = None
        if self._takes_sinks and len(args) <= 2:
            given, sm_scale, *_ = (*args, None, None)
        else:
            refuse_given(args=args)
        if sinks is not None and given is not None:
            raise ContractTypeError("sinks are given twice: by position, and by name")
        attention, requests = self._last_plan.of_call("run")
        if sm_scale is not None:
            sm_scale = one_number(sm_scale, "sm_scale")
            options = replace(attention.plan.options, sm_scale=sm_scale)
            if options != attention.plan.options:
                attention = Attention(replace(attention.plan, options=options))
        return attention, requests.rows(attention.plan.pos_encoding_mode == "ALIBI"), given if sinks is None else sinks

    def _of_forward(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> tuple[Attention, Rows]:
        """The plan, with the options of one call instead of its own."""
        attention, requests = self._last_plan.of_call("forward")
        options = attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        plan = replace(attention.plan, options=options, pos_encoding_mode=pos_encoding_mode)
        requests = replace(requests, causal=flag("causal", causal), _rows={})
        return Attention(plan), requests.rows(pos_encoding_mode == "ALIBI")

    def __repr__(self) -> str:
        facts = [self._kv_layout, str(self._last_plan)]
        if (buffers := self._last_plan.buffers) is not None:
            facts.insert(1, f"{buffers.batch_size} requests in the user's buffers")
        return f"{type(self).__name__}({', '.join(facts)})"


def check_neutral(token_pos_in_items_len: Any = 0, **multi_item: Any) -> None:
    """Refuses the arguments of multi-item scoring.

    Raises:
        ContractError: one of them is given.
        ContractTypeError: `token_pos_in_items_len` is no integer.
    """
    refuse_given(**multi_item)
    if integer("token_pos_in_items_len", token_pos_in_items_len, 0):
        raise ContractError("token_pos_in_items_len must be 0: multi-item scoring is not supported")
