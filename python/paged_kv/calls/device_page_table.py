"""Page tables in a GPU's memory: `PageTable` without what would have to be read to be checked.

Types and shapes are checked; a row without a slot in its table gets page -1, which append skips. Letters in shapes: B
requests, N new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays.types import ArrayDevice, namespace
from paged_kv.calls.page_table import CSR_NAMES, check_count
from paged_kv.calls.token_slots import dense_num_pages, last_tokens, lengths_of, token_slots
from paged_kv.errors import ShapeError


@dataclass(frozen=True, eq=False)
class DevicePageTable:
    """The pages of each request; index tensors are int64."""

    starts: Any
    """`[B]`, where each request's pages begin in `entries`."""
    num_pages: Any
    """`[B]`, pages of each request."""
    entries: Any
    """Page ids."""
    last_page_len: Any
    """`[B]`, tokens in the last page."""
    page_size: int

    @staticmethod
    def of(
        device: ArrayDevice,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        page_size: int,
        names: tuple[str, str, str] = CSR_NAMES,
    ) -> DevicePageTable:
        """The table of FlashInfer's three index arrays.

        Raises:
            ContractTypeError, ContractError: an array is no integer array, or `page_size` no integer of 1 to 2^31 - 1.
            ShapeError: an array is not 1-D, or `last_page_len` is not `[B]`.
        """
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        offsets = device.indices(indptr, names[0])
        entries = device.indices(indices, names[1])
        last = device.indices(last_page_len, names[2])
        check_count(offsets, last, (names[0], names[2]))
        return DevicePageTable(offsets[:-1], offsets[1:] - offsets[:-1], entries, last, size)

    @staticmethod
    def from_dense(device: ArrayDevice, page_table: Any, last_page_len: Any, page_size: int) -> DevicePageTable:
        """The table of `page_table [B, max_pages]`, whose rows end at their first -1.

        Raises:
            ContractTypeError, ContractError, ShapeError: as `of`.
        """
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        table = device.indices(page_table, "page_table", 2)
        last = device.indices(last_page_len, "last_page_len")
        if len(last) != len(table):
            raise ShapeError(f"last_page_len has {len(last)} entries, page_table has {len(table)} rows")
        xp = namespace(table)
        starts = xp.arange(len(table), dtype=xp.int64, device=table.device) * table.shape[1]
        return DevicePageTable(starts, dense_num_pages(table), table.reshape(-1), last, size)

    @property
    def batch_size(self) -> int:
        return len(self.num_pages)

    @property
    def lengths(self) -> Any:
        """`[B]`, tokens of each request: 0 for one without pages."""
        return lengths_of(self.num_pages, self.last_page_len, self.page_size)

    def slots(self, batch_indices: Any, positions: Any, pool_pages: int) -> tuple[Any, Any]:
        """The page and the slot that each of N rows is written to, `[N]` int32 each.

        Page -1 where a row has no slot in the table, or its page is not one of the pool's `pool_pages`. Nothing
        outside `entries` is read, whatever the table says.
        """
        xp = namespace(positions)
        room = xp.where(self.starts >= 0, len(self.entries) - self.starts, 0)
        num_pages = xp.minimum(self.num_pages, room)
        table = (self.starts, num_pages, self.entries)
        pages, slots = token_slots(*table, batch_indices, positions, self.page_size)
        known = (pages >= 0) & (pages < pool_pages)
        return xp.where(known, pages, -1).int(), xp.where(known, slots, 0).int()

    def last_tokens(self, offsets: Any, num_rows: int, names: tuple[str, str]) -> tuple[Any, Any]:
        """The request and the position of rows `[offsets[b], offsets[b + 1])`, the last tokens of request b.

        Raises:
            ShapeError: `offsets` is not `[B + 1]`.
        """
        check_count(offsets, self.num_pages, names)
        return last_tokens(offsets, self.lengths, num_rows)
