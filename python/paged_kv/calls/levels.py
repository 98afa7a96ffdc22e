"""The requests of a cascade: levels of tokens that groups of query rows share, as rows of one attention call.

Level l divides the T query rows into groups, row t is of group g_l(t), and each group has tokens of its own in pages. A
row's context is the tokens of its groups, level after level. The levels nest: a group of a level is whole groups of the
next, and so its context above it is one for all its rows.

One call computes every level: its requests are the groups of all levels, its rows `[L * T]` are the T rows once for
each level, and the states of a row's levels merge. Letters in shapes: L levels, T query rows, G groups of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, shown
from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import Attention, Scales
from paged_kv.calls.merge_states import State, merge
from paged_kv.calls.offsets import MAX_ROWS, Indices, check_offsets, offsets_of
from paged_kv.calls.plan import AttentionPlan, check_array
from paged_kv.calls.ragged import WHY_HOST
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

NAMES = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
"""The names in `plan` of the lists of arrays, one entry a level."""

_FLOAT32 = np.dtype(np.float32)
_NO_SCALES: Scales = (None, None, None)


@dataclass(frozen=True, eq=False)
class Level:
    """The groups of a level. The index arrays may be views of the caller's."""

    qo_indptr: Indices
    """`[G + 1]`: group g has rows `qo_indptr[g]` to `qo_indptr[g + 1]`."""
    table: Table
    """The groups' pages."""
    name: str = "qo_indptr"
    """The name of `qo_indptr` in messages."""

    @staticmethod
    def of(arrays: Sequence[Any], page_size: int, names: Sequence[str]) -> Level:
        """The checked level of a qo_indptr and the three arrays of a page table, of any kind.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `Table.csr` and `check_offsets`, or an array is on a
                GPU.
            ContractError: there are over 2^25 rows.
        """
        rows, indptr, indices, last_page_len = arrays
        devices.require_host(rows, names[0], WHY_HOST)
        table = Table.csr(indptr, indices, last_page_len, page_size, names[1:])
        level = Level(as_indices(rows, names[0]), table, names[0])
        check_offsets(level.qo_indptr, names[0], table.batch_size)
        if level.num_rows > MAX_ROWS:
            raise ContractError(f"{names[0]}: expected at most 2^25 rows, got {level.num_rows}")
        return level

    @staticmethod
    def of_single_rows(arrays: Sequence[Any], page_size: int, names: Sequence[str]) -> Level:
        """The checked level of the three arrays of a page table, with one row a group.

        Raises: as `of`.
        """
        indptr, indices, last_page_len = arrays
        table = Table.csr(indptr, indices, last_page_len, page_size, names)
        return Level(np.arange(table.batch_size + 1, dtype=np.int32), table, names[0])

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels that nest, from the one of the most rows a group to the requests' own tokens.

    Raises:
        ShapeError: two levels have not as many rows.
        PageTableError: a group's end is no group's end in the next level, or a row's context is over 2^31 - 1 tokens.
    """

    levels: tuple[Level, ...]
    causal: bool
    """True if a row sees no token behind its own; the rows are the last tokens of their groups of the last level."""

    def __post_init__(self) -> None:
        first = self.levels[0]
        for above, level in zip(self.levels, self.levels[1:], strict=False):
            if level.num_rows != first.num_rows:
                raise ShapeError(
                    f"{level.name}: expected an end at {first.name}'s {first.num_rows} rows, got {level.num_rows}"
                )
            lost = ~np.isin(above.qo_indptr, level.qo_indptr)
            if lost.any():
                group = int(lost.argmax()) - 1
                raise PageTableError(
                    f"{above.name}: group {group} ends at row {above.qo_indptr[group + 1]}, where no group of"
                    f" {level.name} ends: levels must nest"
                )
        longest = sum(int(level.table.lengths.max(initial=0)) for level in self.levels)
        if longest > LARGEST_INDEX:
            raise PageTableError(f"the longest groups of all levels hold {longest} tokens, over 2^31 - 1")

    @property
    def num_rows(self) -> int:
        """T."""
        return self.levels[0].num_rows

    def arrays(self) -> list[np.ndarray]:
        """Four of each level, in the order of `NAMES`."""
        return [array for level in self.levels for array in (level.qo_indptr, *level.table.arrays)]

    def of_arrays(self, arrays: Sequence[np.ndarray], names: Sequence[str]) -> Levels:
        """The plan with other arrays.

        Raises:
            ContractError: they are inconsistent.
        """
        page_size, levels = self.levels[0].table.page_size, range(0, len(arrays), 4)
        return Levels(tuple(Level.of(arrays[i : i + 4], page_size, names[i : i + 4]) for i in levels), self.causal)

    def fixed(self) -> int:
        """The number of rows."""
        return self.num_rows

    def check_fixed(self, fixed: int) -> None:
        """Refuses another number of rows.

        Raises:
            ShapeError: as said.
        """
        if self.num_rows != fixed:
            raise ShapeError(f"{self.levels[0].name}: expected the first plan's {fixed} rows, got {self.num_rows}")

    def requests(self) -> LevelRows:
        """The rows of one call, level after level.

        A row stands where it would in one flat context: as many tokens before the end as there are rows behind it in
        its group of the last level. Where that group has more rows than tokens, the first ones stand in the levels
        above, or before all tokens, at negative positions.
        """
        num_rows, last = self.num_rows, self.levels[-1]
        groups = [np.repeat(np.arange(len(level.qo_indptr) - 1), np.diff(level.qo_indptr)) for level in self.levels]
        before = np.zeros(num_rows, np.int64)  # tokens of the levels above, [T]
        firsts, lengths, offsets = [], [], []
        for level, group in zip(self.levels, groups, strict=True):
            of_groups = np.zeros(len(level.qo_indptr) - 1, np.int64)
            of_groups[group] = before  # one value for all rows of a group, as levels nest
            offsets.append(of_groups)
            firsts.append(before)
            lengths.append(level.table.lengths[group])
            before = before + lengths[-1]
        behind = last.qo_indptr[1:][groups[-1]] - np.arange(num_rows) - 1  # rows of the same group
        positions = before - 1 - behind
        if self.causal:
            lengths = [np.clip(positions + 1 - first, 0, own) for first, own in zip(firsts, lengths, strict=True)]
        starts = offsets_of([len(of_groups) for of_groups in offsets])
        batch = [group + start for group, start in zip(groups, starts.tolist(), strict=False)]
        alone = len(self.levels) == 1
        return LevelRows(
            Rows(
                Table.joined([level.table for level in self.levels]),
                _int32(np.concatenate(batch)),
                _int32(np.concatenate(lengths)),
                positions=None if alone and self.causal else _int32(np.tile(positions, len(self.levels))),
                token_offsets=None if alone else _int32(np.concatenate(offsets)),
                counted_as="T",
            ),
            _int32(positions),
            self.causal,
            len(self.levels),
        )


@dataclass(frozen=True, eq=False)
class LevelRows:
    """Rows of one call, `[L * T]`."""

    rows: Rows
    positions: Indices
    """`[T]`: where each row stands, counted from the first token of its context."""
    causal: bool
    num_levels: int

    @property
    def num_rows(self) -> int:
        """T."""
        return self.rows.count // self.num_levels

    def __str__(self) -> str:
        return f"{self.num_levels} levels of {self.num_rows} query rows"


class LevelAttention(Attention):
    """An attention whose outputs are float32, to be merged before they are rounded to the planned dtype."""

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(replace(plan, o_dtype=_FLOAT32))
        self._result_dtype = plan.result_dtype

    def states(self, levels: LevelRows, q: Any, pages: Pages) -> list[State]:
        """The states over each level's tokens: outputs `[T, Hq, D]` float32 and lse `[T, Hq]`, views on the device.

        Args:
            levels: The rows.
            q: A view `[T, Hq, D]` on the device of the pages.
            pages: K and V.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `Attention.run`.
        """
        plan, device, rows, number = self.plan, pages.device, levels.num_rows, levels.num_levels
        shape = (rows, plan.num_qo_heads, plan.head_dim)
        check_array(device, "q", q, shape, plan.q_dtype, levels.rows.counted_as)
        if number > 1:
            q = device.stack([q] * number, 0).reshape(number * rows, *shape[1:])
        parts = self.run(q, pages, levels.rows, _NO_SCALES)
        o, lse = (part.reshape(number, rows, *part.shape[1:]) for part in parts)
        return [(o[level], lse[level]) for level in range(number)]

    def merged(self, device: ArrayDevice, states: list[State]) -> State:
        """States of the same rows over disjoint tokens, merged: the output in the planned dtype, and the lse."""
        o, lse = states[0]
        if len(states) > 1:
            o, lse = merge(device, *(device.stack(part, 1) for part in zip(*states, strict=True)))
        return device.astype(o, self._result_dtype), lse


def level_arrays(num_levels: int, lists: Sequence[Any], names: Sequence[str]) -> list[tuple[list[Any], list[str]]]:
    """For each level its arrays and what messages call them, out of one list of arrays for each of `names`.

    Raises:
        ContractTypeError: an argument is no list or tuple.
        ShapeError: one has not an entry a level.
    """
    for name, entries in zip(names, lists, strict=True):
        if not isinstance(entries, list | tuple):
            raise ContractTypeError(f"{name}: expected a list of arrays, one a level, got {shown(entries)}")
        if len(entries) != num_levels:
            raise ShapeError(f"{name}: expected an entry for each of {num_levels} levels, got {len(entries)}")
    return [
        ([entries[level] for entries in lists], [f"{name}[{level}]" for name in names]) for level in range(num_levels)
    ]


def _int32(array: np.ndarray) -> Indices:
    return np.ascontiguousarray(array, np.int32)
