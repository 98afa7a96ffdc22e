"""What a wrapper planned last, for any number of threads that run it and plan anew."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, Protocol, TypeVar

from paged_kv.arrays.overlap import Named
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import Attention
from paged_kv.errors import ContractError

PlannedT = TypeVar("PlannedT", contravariant=True)
"""What `plan` was given of the requests, checked; its arrays may be the caller's."""
RequestsT = TypeVar("RequestsT", covariant=True)
"""What a run takes of it; nothing of it is the caller's memory."""


class PlanBuffers(Protocol[PlannedT, RequestsT]):
    """Arrays of the user's that hold what was planned: `plan` writes them, every `run` reads them."""

    batch_size: int
    """The only one that `plan` may have."""

    def fill(self, planned: PlannedT) -> None:
        """Copies a checked plan into the arrays; `ContractError`s where it does not fit, and nothing was written."""

    def read(self) -> RequestsT:
        """The requests that the arrays hold now, checked; on a GPU, those that were planned last."""

    def on(self, device: ArrayDevice) -> list[Named]:
        """The arrays, with their names, where they lie on that device, else nothing."""


class LastPlan(Generic[PlannedT, RequestsT]):
    """An attention and its requests, replaced together: a call sees one plan whole, the old or the new one.

    Args:
        make: The requests of a plan.
        buffers: Arrays of the user's that hold the plan; None where each plan keeps its own.
    """

    def __init__(self, make: Callable[[PlannedT], RequestsT], buffers: PlanBuffers[PlannedT, RequestsT] | None) -> None:
        self.buffers = buffers
        self._make = make
        self._plan: tuple[Attention, RequestsT | None] | None = None  # read and replaced as one value
        self._lock = Lock()  # of `buffers`: filled and read as a whole

    def replace(self, attention: Attention, planned: PlannedT) -> None:
        """Plans checked requests anew.

        Raises:
            ContractError: they do not fit the user's buffers; the former plan stays.
        """
        if self.buffers is None:
            self._plan = attention, self._make(planned)
            return
        with self._lock:
            self.buffers.fill(planned)
            self._plan = attention, None

    def of_call(self, name: str) -> tuple[Attention, RequestsT]:
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
        return str(attention.plan) if requests is None else f"{requests}, {attention.plan}"
