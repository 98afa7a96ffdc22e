"""What a wrapper planned last, for any number of threads that run it and plan anew."""

from __future__ import annotations

from threading import Lock

from paged_kv.calls.attend import Attention
from paged_kv.calls.buffers import PageTableBuffers
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError


class LastPlan:
    """An attention and its requests, replaced together: a call sees one plan whole, the old or the new one.

    Args:
        buffers: Arrays of the user's that hold the page table; None where each plan keeps its own.
    """

    def __init__(self, buffers: PageTableBuffers | None) -> None:
        self.buffers = buffers
        self._plan: tuple[Attention, Rows | None] | None = None  # read and replaced as one value
        self._lock = Lock()  # of `buffers`: filled and read as a whole

    def replace(self, attention: Attention, table: PageTable) -> None:
        """Plans a checked page table anew.

        Raises:
            ShapeError: it does not fit the user's buffers; the former plan stays.
        """
        if self.buffers is None:
            self._plan = attention, Rows.of_decode(table)
            return
        with self._lock:
            self.buffers.fill(table)
            self._plan = attention, None

    def of_call(self, name: str) -> tuple[Attention, Rows]:
        """The plan for a call of that name; the requests are those that the user's buffers hold now.

        Raises:
            ContractError: nothing was planned.
            PageTableError: the buffers hold no consistent page table.
        """
        if self._plan is None:
            raise ContractError(f"{name}: nothing is planned, call plan (or begin_forward) first")
        attention, rows = self._plan
        if rows is not None:
            return attention, rows
        assert self.buffers is not None
        with self._lock:
            attention, _ = self._plan
            return attention, self.buffers.rows(attention.plan.page_size)

    def __str__(self) -> str:
        if self._plan is None:
            return "nothing planned"
        attention, rows = self._plan
        if rows is None:
            return str(attention.plan)
        return f"{rows.batch_size} requests of up to {rows.lengths.max(initial=0)} tokens, {attention.plan}"
