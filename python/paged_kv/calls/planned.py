"""The last plan of a wrapper, for any number of threads that run it and plan anew."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

from paged_kv.calls.buffers import FixedBuffers, PlannedT, RequestsT
from paged_kv.errors import ContractError

AttentionT = TypeVar("AttentionT")
"""A plan with its operands prepared; it has a `plan`."""


class LastPlan(Generic[AttentionT, PlannedT, RequestsT]):
    """An attention and its requests, replaced together: a call sees one plan whole, the old or the new one.

    Args:
        buffers: Arrays of the user's that hold what is planned; None where each plan keeps its own.
    """

    def __init__(self, buffers: FixedBuffers[PlannedT, RequestsT] | None) -> None:
        self.buffers = buffers
        self._plan: tuple[AttentionT, RequestsT | None] | None = None  # read and replaced as one value
        self._lock = Lock()  # of `buffers`: filled and read as a whole

    def replace(self, attention: AttentionT, planned: PlannedT) -> None:
        """Plans checked requests anew.

        Raises:
            ContractError: they do not fit the user's buffers; the former plan stays.
        """
        if self.buffers is None:
            self._plan = attention, planned.requests()
            return
        with self._lock:
            self.buffers.fill(planned)
            self._plan = attention, None

    def of_call(self, name: str) -> tuple[AttentionT, RequestsT]:
        """The plan for a call of that name; the requests are those that the user's buffers hold now.

        Raises:
            ContractError: nothing was planned, or the buffers hold no consistent requests.
        """
        if self._plan is None:
            raise ContractError(f"{name}: nothing is planned, call plan (or begin_forward) first")
        attention, requests = self._plan
        if requests is not None:
            return attention, requests
        assert self.buffers is not None
        with self._lock:
            attention, _ = self._plan
            return attention, self.buffers.read()

    def __str__(self) -> str:
        if self._plan is None:
            return "nothing planned"
        attention, requests = self._plan
        return str(attention) if requests is None else f"{requests}, {attention}"
