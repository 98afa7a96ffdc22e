"""Arrays of the user's that hold what was planned: written by `plan`, read by every `run`.

Letters in shapes: B requests, or groups of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from paged_kv.arrays.autograd_writes import mark_written
from paged_kv.arrays.devices import device_of
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

RequestsT = TypeVar("RequestsT", covariant=True)
"""The part of a plan that a run takes; nothing of it is the caller's memory."""

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_BYTES = (np.dtype(np.uint8),)


class Planned(Protocol[RequestsT]):
    """The requests as `plan` was given them, checked; its arrays may be the caller's."""

    def arrays(self) -> Sequence[np.ndarray | None]:
        """Return what fixed buffers hold of it, in their order; None where it has no such array."""

    def of_arrays(self, arrays: Sequence[np.ndarray], names: Sequence[str]) -> Self:
        """The same plan of other arrays, in the order of those of `arrays` that are not None; messages call them
        `names`.

        Raises:
            ContractError: they are inconsistent.
        """

    def fixed(self) -> int:
        """Return what the first plan into fixed buffers fixes, beside the batch."""

    def check_fixed(self, fixed: int) -> None:
        """Refuses what the first plan, of `fixed`, does not allow.

        Raises:
            ContractError: as said.
        """

    def requests(self) -> RequestsT:
        """Return what a run takes of it; it is copied."""


PlannedT = TypeVar("PlannedT", bound=Planned[Any])


@dataclass(frozen=True)
class Buffer:
    """One of the arrays."""

    name: str
    """As the constructor's argument."""
    planned_as: str = ""
    """The argument of `plan` that its length follows from, for messages."""
    extra: int | None = 0
    """Entries beyond B: 1 for offsets; None where any number of them may be used."""
    optional: bool = False
    is_mask: bool = False
    """True if it holds bytes of masks, uint8, and not int32 or int64."""


class FixedBuffers(Generic[PlannedT, RequestsT]):
    """A plan in arrays of the user's, which fix the batch.

    Arrays in a GPU's memory are written by `plan` alone: reading them would wait for the device, so `run` uses what was
    planned last, and what is written to them in between does not count.

    One thread at a time may call it; `LastPlan`, which owns it, sees to that. Other code that writes to the arrays, or
    another wrapper over the same ones, has to wait until no call of this one is under way.

    Args:
        groups: The arrays that have a batch size in common: one group, or one a level.
        arrays: As many, group after group.
        lives: What messages say lives in them.

    Raises:
        ContractError: an array is missing or read-only, or shares memory with another one or within itself.
        ContractTypeError: an array is no array, or of another dtype.
        ShapeError: an array is not 1-D, or the lengths of two do not fit each other.
    """

    def __init__(self, groups: Sequence[Sequence[Buffer]], arrays: Sequence[Any], lives: str) -> None:
        self._buffers = [buffer for group in groups for buffer in group]
        by_name = dict(zip((buffer.name for buffer in self._buffers), arrays, strict=True))
        for buffer in self._buffers:
            if by_name[buffer.name] is None and not buffer.optional:
                raise ContractError(
                    f"{buffer.name}: expected an array where {lives} in buffers (use_cuda_graph=True), got None"
                )
        self._arrays = by_name
        self._device = device_of(**by_name)
        self._views = {
            buffer.name: _view(self._device, by_name[buffer.name], buffer)
            for buffer in self._buffers
            if by_name[buffer.name] is not None
        }
        for group in groups:
            self.batch_size = self._check_lengths(group)
        check_written(self._device, list(self._views.items()))
        self._fixed: int | None = None
        self._last: PlannedT | None = None
        self._requests: RequestsT | None = None  # where the arrays are not read again

    def on(self, device: ArrayDevice) -> list[Named]:
        """The arrays with their names, where they lie on that device, else nothing."""
        return list(self._views.items()) if device == self._device else []

    def fill(self, planned: PlannedT) -> None:
        """Copies a checked plan into the arrays, which may be the plan's own.

        Raises:
            ShapeError: it has another batch size, or more entries than fit; nothing was written.
            ContractError: the first plan fixed something otherwise, or an array is needed that is missing.
        """
        if self._fixed is not None:
            planned.check_fixed(self._fixed)
        sources = dict(self._sources(planned))
        targets = {name: self._views[name][: len(source)] for name, source in sources.items()}
        readable = self._device.readable
        if readable:  # before anything is written: one array of the user's may be another's source
            sources = {name: self._device.separate(source, list(targets.values())) for name, source in sources.items()}
        requests = None if readable else planned.requests()
        mark_written(self._arrays[name] for name in sources)
        for name, source in sources.items():
            self._device.write(targets[name], source)
        self._fixed = planned.fixed() if self._fixed is None else self._fixed
        self._last, self._requests = planned, requests

    def read(self) -> RequestsT:
        """The requests that the arrays hold now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned, or they are inconsistent.
        """
        if self._last is None:
            raise ContractError("run: nothing is planned, call plan first")
        if self._requests is not None:
            return self._requests
        held = [
            buffer.name for buffer, array in zip(self._buffers, self._last.arrays(), strict=True) if array is not None
        ]
        # Copies: what is checked is what is read, even where another thread writes to the arrays.
        return self._last.of_arrays([self._device.clone(self._views[name]) for name in held], held).requests()

    def _sources(self, planned: PlannedT) -> Sequence[tuple[str, np.ndarray]]:
        """Return what is copied into each array, where it fits."""
        sources = []
        for buffer, array in zip(self._buffers, planned.arrays(), strict=True):
            if array is None:
                continue
            if buffer.name not in self._views:
                raise ContractError(
                    f"{buffer.name}: expected an array for a mask where the requests live in buffers, got None"
                )
            held, count = len(self._views[buffer.name]), len(array)
            if count > held or (count < held and buffer.extra is not None):
                raise ShapeError(self._misfit(buffer, held, count))
            sources.append((buffer.name, array))
        return sources

    def _misfit(self, buffer: Buffer, held: int, count: int) -> str:
        if not buffer.planned_as:
            return f"{buffer.name} holds {held} entries, the plan has {count}"
        if buffer.extra is None:
            return f"{buffer.planned_as}: {count} page ids, {buffer.name} holds {held}"
        return f"{buffer.planned_as}: a batch of {count - buffer.extra}, the buffers fix it at {self.batch_size}"

    def _check_lengths(self, group: Sequence[Buffer]) -> int:
        """B of a group."""
        sized = [(buffer, len(self._views[buffer.name])) for buffer in group if buffer.name in self._views]
        sized = [(buffer, length) for buffer, length in sized if buffer.extra is not None]
        # The array of B entries where there is one: offsets are compared with it.
        measure, entries = min(sized, key=lambda one: one[0].extra or 0)
        batch_size = entries - (measure.extra or 0)
        for buffer, length in sized:
            expected = batch_size + (buffer.extra or 0)
            if length != expected:
                than = "as" if buffer.extra == measure.extra else "one more than"
                raise ShapeError(f"{buffer.name} has {length} entries, expected {expected}: {than} {measure.name}")
        return batch_size


def _view(device: ArrayDevice, array: Any, buffer: Buffer) -> Any:
    """A writable view of one of the user's arrays.

    Raises:
        ContractTypeError: it is no array, or of another dtype.
        ShapeError: it is not 1-D.
        ContractError: it is read-only.
    """
    name, dtypes = buffer.name, _BYTES if buffer.is_mask else _INDEX_DTYPES
    view = device.view(array, name)
    dtype = device.dtype(view)
    if dtype not in dtypes:
        raise ContractTypeError(f"{name}: dtype {dtype.name}, expected {' or '.join(d.name for d in dtypes)}")
    if view.ndim != 1:
        raise ShapeError(f"{name}: shape {list(view.shape)}, expected one dimension")
    if not device.is_writable(view):
        raise ContractError(f"{name} is read-only, and plan writes to it")
    return view
