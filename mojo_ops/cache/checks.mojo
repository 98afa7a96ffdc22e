"""The contract of the ops: what is refused, before anything is written.

Every message names the argument, the request and the value.
"""

from std.math import ceildiv
from std.utils import IndexList

from .paged_kv_cache import PageStrides, TablePointer
from ..attention.logits import Logits

comptime RowPointer = Pointer[Int32, ImmUntrackedOrigin]


@fieldwise_init
struct PageTable(TrivialRegisterPassable):
    """A dense page table `[batch, max_pages]` over a pool of `num_pages` pages of `page_size` slots."""

    var entries: TablePointer
    var batch: Int
    var max_pages: Int
    var num_pages: Int
    var page_size: Int

    def check_shape(self) raises:
        if self.page_size < 1:
            raise Error("page_size must be at least 1, the cache has ", self.page_size)

    def page(self, request: Int, page_slot: Int) raises -> Int:
        """The page id in one slot of the table, refused where the pool has no such page."""
        var page = Int(self.entries[unsafe_offset=request * self.max_pages + page_slot])
        if page >= self.num_pages:
            raise Error(
                "lookup_table: request ",
                request,
                ", page slot ",
                page_slot,
                " holds page id ",
                page,
                ", outside the pool's [0, ",
                self.num_pages,
                ")",
            )
        return page

    def check_tokens(self, what: StaticString, request: Int, first: Int, length: Int) raises:
        """Refuses a request whose tokens `[first, length)` do not all lie in pages of the pool."""
        var used = ceildiv(length, self.page_size)
        if used > self.max_pages:
            raise Error(
                what,
                ": request ",
                request,
                " has ",
                length,
                " tokens, which need ",
                used,
                " pages of ",
                self.page_size,
                ", but lookup_table has ",
                self.max_pages,
                " columns",
            )
        for page_slot in range(first // self.page_size, used):
            _ = self.page(request, page_slot)


def check_same_cache[rank: Int](k_shape: IndexList[rank], v_shape: IndexList[rank], k_at: Int, v_at: Int) raises:
    """K and V have one shape; only arrays that hold both (rank 5, 6) may be, and must be, the same."""
    if k_shape != v_shape:
        raise Error("v_blocks: shape ", v_shape, " differs from k_blocks' ", k_shape)
    comptime if rank >= 5:
        if k_shape[1] != 2:
            raise Error("k_blocks: dimension 1 must be 2 (K and V), not ", k_shape[1])
        if k_at != v_at and k_shape.flattened_length() > 0:
            raise Error("v_blocks: a cache that holds K and V is passed twice, but these are two arrays")


def check_view(what: StaticString, shape: IndexList[4], strides: PageStrides, size: Int) raises:
    """A strided view `[page, slot, head, dim]` lies within its `size` elements."""
    var is_empty = False
    for axis in range(4):
        if shape[axis] < 0:
            raise Error(what, ": shape ", shape, " has a negative dimension")
        is_empty |= shape[axis] == 0
    if is_empty:
        return
    if strides.start < 0 or strides.page < 0 or strides.slot < 0 or strides.head < 0:
        raise Error(what, ": negative strides are not supported")
    # What is left of the storage shrinks axis by axis: a product of sizes could pass 64 bits.
    var left = size - 1 - strides.start
    var steps = IndexList[4](strides.page, strides.slot, strides.head, 1)
    for axis in range(4):
        var last = shape[axis] - 1
        if left < 0 or (steps[axis] > 0 and last > left // steps[axis]):
            raise Error(what, ": the view of shape ", shape, " runs past the storage's ", size, " elements")
        left -= last * steps[axis]


def check_equal(what: StaticString, found: Int, expected: Int) raises:
    if found != expected:
        raise Error(what, " is ", found, ", expected ", expected)


def check_rows(table: PageTable, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, logits: Logits) raises:
    """Checks the rows of an attention call and every page that they read."""
    table.check_shape()
    var first = List[Int](length=table.batch, fill=Int.MAX)
    var longest = List[Int](length=table.batch, fill=0)
    for row in range(num_rows):
        var request = Int(row_batch[unsafe_offset=row])
        var length = Int(row_lengths[unsafe_offset=row])
        if request < -1 or request >= table.batch:
            raise Error("row_batch: row ", row, " names request ", request, " of ", table.batch)
        if length < 0:
            raise Error("row_lengths: row ", row, " (request ", request, ") has length ", length)
        if request >= 0 and length > 0:
            first[request] = min(first[request], logits.first_token(length))
            longest[request] = max(longest[request], length)
    for request in range(table.batch):
        if longest[request] > 0:
            table.check_tokens("row_lengths", request, first[request], longest[request])


def check_append(table: PageTable, batch_indices: RowPointer, positions: RowPointer, num_rows: Int) raises:
    """Checks the rows of an append: requests, positions, their pages, and that no two rows share a slot."""
    table.check_shape()
    var capacity = 16
    while capacity < 2 * num_rows:
        capacity *= 2
    # Open addressing: slot + 1 of each row seen, 0 = free.
    var seen = List[Int](length=capacity, fill=0)
    for row in range(num_rows):
        var request = Int(batch_indices[unsafe_offset=row])
        var position = Int(positions[unsafe_offset=row])
        if request == -1:
            continue
        if request < -1 or request >= table.batch:
            raise Error("batch_indices: row ", row, " names request ", request, " of ", table.batch)
        if position < 0:
            raise Error("positions: row ", row, " (request ", request, ") has position ", position)
        var page_slot, slot = divmod(position, table.page_size)
        if page_slot >= table.max_pages:
            raise Error(
                "positions: row ",
                row,
                " (request ",
                request,
                ") has position ",
                position,
                ", past the ",
                table.max_pages,
                " pages of ",
                table.page_size,
                " in lookup_table",
            )
        var page = table.page(request, page_slot)
        var key = page * table.page_size + slot + 1
        var probe = (key * 0x9E3779B97F4A7C15 >> 20) & (capacity - 1)
        while seen[probe] != 0:
            if seen[probe] == key:
                raise Error(
                    "positions: row ",
                    row,
                    " (request ",
                    request,
                    ", position ",
                    position,
                    ") writes slot ",
                    slot,
                    " of page ",
                    page,
                    ", which an earlier row already writes",
                )
            probe = (probe + 1) & (capacity - 1)
        seen[probe] = key


def check_gather(table: PageTable, indptr: RowPointer, num_rows: Int) raises:
    """Checks `indptr` `[batch + 1]` and every page that a gather reads."""
    table.check_shape()
    if indptr[unsafe_offset=0] != 0:
        raise Error("indptr must start at 0, not ", indptr[unsafe_offset=0])
    for request in range(table.batch):
        var length = Int(indptr[unsafe_offset=request + 1] - indptr[unsafe_offset=request])
        if length < 0:
            raise Error("indptr decreases at request ", request, ": ", length, " tokens")
        table.check_tokens("indptr", request, 0, length)
    check_equal("indptr: its last entry", Int(indptr[unsafe_offset=table.batch]), num_rows)


def check_heads(q_heads: Int, kv_heads: Int, q_dim: Int, kv_dim: Int) raises:
    if kv_heads < 1 or q_heads % kv_heads != 0:
        raise Error("q: its ", q_heads, " heads are no multiple of the cache's ", kv_heads, " KV heads")
    check_equal("q: its head_dim", q_dim, kv_dim)
    if kv_dim < 8 or kv_dim > 512 or kv_dim % 8 != 0:
        raise Error("head_dim must be a multiple of 8 from 8 to 512, not ", kv_dim)


def check_offsets(row_offsets: TablePointer, batch: Int, num_rows: Int) raises:
    """Row offsets `[batch + 1]` start at 0, never decrease, and end within the rows."""
    if row_offsets[unsafe_offset=0] != 0:
        raise Error("row_offsets must start at 0, not ", row_offsets[unsafe_offset=0])
    for request in range(batch):
        if row_offsets[unsafe_offset=request + 1] < row_offsets[unsafe_offset=request]:
            raise Error("row_offsets decreases at request ", request)
    if Int(row_offsets[unsafe_offset=batch]) > num_rows:
        raise Error("row_offsets ends at ", row_offsets[unsafe_offset=batch], ", past the ", num_rows, " rows")
