"""The query rows of an attention call and the pages that they may read, as the ops take them.

Letters in shapes: B requests, R query rows. The rows of one request lie side by side. Nothing here is the caller's
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paged_kv.arrays.types import ArrayDevice, Operand
from paged_kv.call_layouts import ATTENTION, CACHE_TABLE
from paged_kv.calls.offsets import MAX_ROWS, Indices
from paged_kv.calls.table import Table
from paged_kv.errors import PageTableError, ShapeError

_ADDRESSES = ATTENTION.part("row_batch row_lengths")
_NO_INT32 = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class RowMasks:
    """The tokens of its request that each row sees: one bit a token."""

    bits: npt.NDArray[np.uint8]
    """`[bytes]`, the lowest bit of a byte first."""
    starts: npt.NDArray[np.int64]
    """`[R]`, where each row's bits begin, in bits; -1 for a row without a mask."""
    firsts: Indices = field(default_factory=lambda: _NO_INT32)
    """`[R]`, the token that a row's first bit is for: those before are seen. No entries: 0 for every row."""


_NO_MASKS = RowMasks(np.zeros(0, np.uint8), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Rows:
    """Query rows: row r sees those of the first `lengths[r]` tokens of request `batch[r]` that its mask and the window
    let through.
    """

    table: Table
    batch: Indices
    """`[R]`, the request of each row."""
    lengths: Indices
    """`[R]`, in tokens; a row of 0 has o = 0 and lse = -inf."""
    positions: Indices | None = None
    """`[R]`, where a row's own token stands: from there the window counts back, and RoPE turns q. None: each row's is
    the last that it sees, `lengths - 1` (past the first token of its request, see `token_offsets`)."""
    token_offsets: Indices | None = None
    """`[B]`, where the first token of each request's pages stands; None: at 0."""
    masks: RowMasks | None = None
    """None: no row has one."""
    counted_as: str = "B"
    """The name of R in messages."""
    _uploaded: dict[tuple[ArrayDevice, bool], tuple[Operand, ...]] = field(default_factory=dict)
    _repeated: dict[int, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table.owned())

    @staticmethod
    def of_decode(table: Table) -> Rows:
        """One row a request, which sees all its tokens."""
        return Rows(table, np.arange(table.batch_size, dtype=np.int32), table.lengths)

    def repeated(self, number: int) -> Rows:
        """As many rows for each request instead of the one of `of_decode`: the request's last tokens, in order.

        Each sees the tokens up to itself. Rows of a request without tokens see nothing.

        Raises:
            PageTableError: as `check_new_tokens`.
            ShapeError: they are over 2^25 rows.
        """
        if number == 1:
            return self
        rows = self._repeated.get(number)
        if rows is None:
            if number * self.count > MAX_ROWS:
                raise ShapeError(f"q_len_per_req: {number} rows of each of {self.count} requests are over 2^25 rows")
            check_new_tokens(self.lengths, number)
            lengths = np.maximum(self.lengths[:, None] + np.arange(1 - number, 1, dtype=np.int32), 0).reshape(-1)
            rows = self._repeated[number] = Rows(
                self.table, self.batch.repeat(number), lengths, counted_as="B * q_len_per_req"
            )
        return rows

    @property
    def count(self) -> int:
        """R."""
        return len(self.batch)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.table.batch_size

    def __str__(self) -> str:
        return f"{self.batch_size} requests of up to {self.lengths.max(initial=0)} tokens"

    def is_plain(self, windowed: bool, pos_encoding_mode: str) -> bool:
        """Return whether the op without masks computes it: rows stand at the last token that they see, or it does not
        matter.

        Args:
            windowed: Whether there is a window.
            pos_encoding_mode: One of `plan.POS_ENCODING_MODES`.
        """
        rows_matter = windowed or pos_encoding_mode == "ROPE_LLAMA"
        tokens_matter = rows_matter or pos_encoding_mode == "ALIBI"
        offset = tokens_matter and self.token_offsets is not None
        return self.masks is None and not offset and not (rows_matter and self.positions is not None)

    @cached_property
    def addresses(self) -> tuple[bytes, bytes]:
        """Addresses of row_batch and row_lengths on the host, and of lookup_table with its shape."""
        entries = self.table.lookup_table
        for array, dtype in ((self.batch, np.int32), (self.lengths, np.int32), (entries, np.uint32)):
            assert array.dtype == dtype
            assert array.flags.c_contiguous
        rows = _ADDRESSES.pack(self.batch.ctypes.data, self.lengths.ctypes.data)
        return rows, CACHE_TABLE.pack(entries.ctypes.data, *entries.shape)

    def operands_on(self, device: ArrayDevice) -> tuple[Operand, Operand, Operand]:
        """row_batch, row_lengths and lookup_table in a device's memory: copied there once, which waits for nothing."""
        operands = self._uploaded.get((device, False))
        if operands is None:
            operands = self._upload(device, False, self.batch, self.lengths, self.table.lookup_table)
        row_batch, row_lengths, lookup_table = operands
        return row_batch, row_lengths, lookup_table

    def masked_operands_on(self, device: ArrayDevice) -> tuple[Operand, ...]:
        """row_positions, token_offsets, mask, mask_starts and mask_firsts there; what is None has no entries."""
        operands = self._uploaded.get((device, True))
        if operands is None:
            masks = self.masks or _NO_MASKS
            positions = _NO_INT32 if self.positions is None else self.positions
            offsets = _NO_INT32 if self.token_offsets is None else self.token_offsets
            operands = self._upload(device, True, positions, offsets, masks.bits, masks.starts, masks.firsts)
        return operands

    def _upload(self, device: ArrayDevice, masked: bool, *arrays: np.ndarray) -> tuple[Operand, ...]:
        operands = self._uploaded[device, masked] = tuple(device.upload(array) for array in arrays)
        return operands


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """The requests of a decode as its `plan` is given them, checked. The table may be a view of the caller's."""

    table: Table
    q_len_per_req: int
    """Query rows of each request; a run may have another number."""

    def __post_init__(self) -> None:
        check_new_tokens(self.table.lengths, self.q_len_per_req)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Those of the page table."""
        return self.table.arrays

    def of_arrays(self, arrays: Sequence[np.ndarray], names: Sequence[str]) -> DecodeBatch:
        """The plan with another page table; a run checks whether its requests have tokens for their rows.

        Raises:
            ContractError: it is inconsistent.
        """
        return replace(self, table=self.table.of_arrays(arrays, names), q_len_per_req=1)

    def fixed(self) -> int:
        """The number of rows."""
        return self.q_len_per_req

    def check_fixed(self, fixed: int) -> None:
        """Refuses another number of rows.

        Raises:
            ShapeError: as said.
        """
        if self.q_len_per_req != fixed:
            raise ShapeError(f"q_len_per_req: expected the first plan's {fixed}, got {self.q_len_per_req}")

    def requests(self) -> Rows:
        """One row a request, which `Rows.repeated` makes several."""
        return Rows.of_decode(self.table)


def check_new_tokens(lengths: Indices, numbers: int | Indices) -> None:
    """Refuses requests that have some tokens, but fewer than rows: the new tokens are appended before.

    Args:
        lengths: `[B]`, in tokens.
        numbers: How many rows each request has, or `[B]`.

    Raises:
        PageTableError: as said.
    """
    short = (lengths > 0) & (lengths < numbers)
    if short.any():
        b = int(short.argmax())
        number = np.broadcast_to(numbers, lengths.shape)[b]
        raise PageTableError(
            f"q_len_per_req: request {b} has {number} query rows and {lengths[b]} tokens: its first row would see an"
            " empty KV range; the new tokens are to be appended first"
        )
