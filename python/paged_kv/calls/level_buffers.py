"""Arrays of the user's that hold the levels of a cascade: written by `plan`, read by every `run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.arrays.devices import device_of
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.buffers import INDEX_DTYPES, buffer_view
from paged_kv.calls.levels import Level, LevelRows, Levels, level_arrays
from paged_kv.errors import ContractError, ShapeError

NAMES = (
    "qo_indptr_buf_arr",
    "paged_kv_indptr_buf_arr",
    "paged_kv_indices_buf_arr",
    "paged_kv_last_page_len_buf_arr",
)
_INDICES = 2


class LevelBuffers:
    """Levels in four lists of the user's arrays. They fix the numbers of groups, and the first plan that of rows.

    Arrays in a GPU's memory are written by `plan` alone, as those of `PageTableBuffers`. One thread at a time may call
    it; the wrapper that owns it sees to that.

    Args:
        num_levels: L.
        lists: For each of `NAMES` a list of L arrays.

    Raises:
        ContractError: a list or an array is missing, or an array is read-only or shares memory with another one or
            within itself.
        ContractTypeError: an argument is no list, or an entry no array of int32 or int64.
        ShapeError: a list has not L entries, or the arrays of a level do not fit each other.
    """

    def __init__(self, num_levels: int, lists: Sequence[Any]) -> None:
        for name, entries in zip(NAMES, lists, strict=True):
            if entries is None:
                raise ContractError(f"{name} is needed where the levels live in buffers (use_cuda_graph=True)")
        by_level = level_arrays(num_levels, lists, NAMES)
        given = {name: array for arrays, names in by_level for array, name in zip(arrays, names, strict=True)}
        for name, array in given.items():
            if array is None:
                raise ContractError(f"{name} is None, and an array is needed")
        self._device = device_of(**given)
        self._names = [names for _, names in by_level]
        self._views = {name: buffer_view(self._device, array, name, INDEX_DTYPES) for name, array in given.items()}
        for rows, indptr, _, last in self._names:
            groups = len(self._views[last])
            for name in (rows, indptr):
                if len(self._views[name]) != groups + 1:
                    raise ShapeError(
                        f"{name} has {len(self._views[name])} entries, expected {groups + 1}: {last}'s + 1"
                    )
        check_written(self._device, list(self._views.items()))
        self.batch_size = len(self._views[self._names[-1][-1]])
        self._num_rows: int | None = None
        self._facts: tuple[int, bool] | None = None  # page_size, causal
        self._planned: LevelRows | None = None  # where the arrays are not read again

    def on(self, device: ArrayDevice) -> list[Named]:
        """The arrays where they lie on that device, else nothing."""
        return list(self._views.items()) if device == self._device else []

    def fill(self, levels: Levels) -> None:
        """Copies checked levels into the arrays, which may be the levels' own.

        Raises:
            ShapeError: other numbers of groups or rows, or more page ids than fit; nothing was written.
        """
        if self._num_rows not in (None, levels.num_rows):
            raise ShapeError(
                f"{levels.levels[0].name} ends at {levels.num_rows} rows, the first plan has {self._num_rows}"
            )
        sources: dict[str, np.ndarray] = {}
        for level, names in zip(levels.levels, self._names, strict=True):
            table = level.table
            arrays = (level.qo_indptr, table.indptr, table.used_indices, table.last_page_len)
            for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
                held = len(self._views[name])
                if len(array) != held and (i != _INDICES or len(array) > held):
                    raise ShapeError(f"{name} holds {held} entries, the plan has {len(array)}")
                sources[name] = array
        targets = {name: self._views[name][: len(source)] for name, source in sources.items()}
        planned = None if self._device.readable else levels.rows()
        if self._device.readable:  # before anything is written: one array of the user's may be another's source
            sources = {name: self._device.apart(source, list(targets.values())) for name, source in sources.items()}
        for name, source in sources.items():
            self._device.write(targets[name], source)
        self._facts, self._planned = (levels.levels[0].table.page_size, levels.causal), planned
        self._num_rows = levels.num_rows

    def read(self) -> LevelRows:
        """The rows that the arrays describe now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned, the arrays hold no consistent levels, or other numbers of rows.
        """
        if self._facts is None:
            raise ContractError("run: nothing is planned, call plan first")
        if self._planned is not None:
            return self._planned
        page_size, causal = self._facts
        # Copies: what is checked is what is read, even where another thread writes to the arrays.
        levels = [
            Level.of([self._device.clone(self._views[name]) for name in names], page_size, names)
            for names in self._names
        ]
        return Levels(tuple(levels), causal).rows()
