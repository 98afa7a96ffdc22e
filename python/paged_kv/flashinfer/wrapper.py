"""Base of FlashInfer's wrappers: the last plan, and methods without effect."""

from __future__ import annotations

from typing import Any, Generic

from paged_kv.arrays.pages import check_layout
from paged_kv.calls.buffers import Buffer, PlannedT, RequestsT
from paged_kv.calls.planned import AttentionT, LastPlan

TABLE_BUFFERS = (
    Buffer("paged_kv_indptr_buffer", "indptr", extra=1),
    Buffer("paged_kv_indices_buffer", "indices", extra=None),
    Buffer("paged_kv_last_page_len_buffer", "last_page_len"),
)
"""The user's buffers of a decode's page table."""
_WORKSPACE_BYTES = 16


class PlannedWrapper(Generic[AttentionT, PlannedT, RequestsT]):
    """A wrapper: `plan` once, `run` for every layer.

    Threads may share it. A run follows one plan whole: the one in force when it began. The user's buffers of
    `use_cuda_graph` are the exception: while other code writes to them, or another wrapper over the same ones plans, no
    run may begin.

    Args:
        kv_layout: "NHD" or "HND".
        last_plan: Empty; it has the user's buffers.

    Raises:
        ContractError: the layout is unknown.
    """

    def __init__(self, kv_layout: str, last_plan: LastPlan[AttentionT, PlannedT, RequestsT]) -> None:
        check_layout(kv_layout)
        self._kv_layout = kv_layout
        self._last_plan = last_plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if the requests live in the user's buffers and the batch is fixed."""
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

    def __repr__(self) -> str:
        facts = [self._kv_layout, str(self._last_plan)]
        if (buffers := self._last_plan.buffers) is not None:
            facts.insert(1, f"{buffers.batch_size} requests in the user's buffers")
        return f"{type(self).__name__}({', '.join(facts)})"
