"""The request, slot, position and mask of each row of a step whose rows form trees: candidate continuations."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from ..cache.pointers import RowPointer, TablePointer


@fieldwise_init
struct TreeRows(DevicePassable, TrivialRegisterPassable):
    """Arrays that a call fills for its `num_rows` rows, and the size of the masks."""

    comptime device_type: AnyType = Self

    var batch_indices: Pointer[Int32, MutUntrackedOrigin]
    """`[num_rows]`: the row's request; -1 is padding."""
    var slots: Pointer[Int32, MutUntrackedOrigin]
    """`[num_rows]`: the token of its request that the row is appended as."""
    var positions: Pointer[Int32, MutUntrackedOrigin]
    """`[num_rows]`: its position in the text: cached tokens and ancestors."""
    var firsts: Pointer[Int32, MutUntrackedOrigin]
    """`[num_rows]`: the cached tokens, which no mask hides."""
    var starts: Pointer[Int64, MutUntrackedOrigin]
    """`[num_rows]`: the first bit of the row's mask; -1 where it sees all rows of its request up to itself."""
    var mask: Pointer[UInt8, MutUntrackedOrigin]
    """`[num_rows, mask_bytes]`: bit i is the request's i-th row."""
    var num_rows: Int64
    var mask_bytes: Int64

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "TreeRows"

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @always_inline
    def mask_bits(self) -> Int:
        """Rows of a request that a mask can show."""
        return 8 * Int(self.mask_bytes)

    @always_inline
    def pad(self, row: Int):
        """Makes a row that no request holds padding."""
        self.batch_indices[unsafe_offset=row] = -1
        self.slots[unsafe_offset=row] = 0
        self.positions[unsafe_offset=row] = 0
        self.firsts[unsafe_offset=row] = 0
        self.starts[unsafe_offset=row] = -1
        self.clear_mask(row)

    @always_inline
    def clear_mask(self, row: Int):
        var at = row * Int(self.mask_bytes)
        for byte in range(Int(self.mask_bytes)):
            self.mask[unsafe_offset=at + byte] = 0

    @always_inline
    def set(self, row: Int, request: Int, index: Int, depth: Int, cached: Int):
        """All but the mask of the request's row `index`, which has `depth` ancestors."""
        self.batch_indices[unsafe_offset=row] = Int32(request)
        self.slots[unsafe_offset=row] = Int32(cached + index)
        self.positions[unsafe_offset=row] = Int32(cached + depth)
        self.firsts[unsafe_offset=row] = Int32(cached)
        # As many ancestors as rows before it: it sees them all, as in a text without branches.
        self.starts[unsafe_offset=row] = -1 if depth == index else Int64(row * self.mask_bits())

    @always_inline
    def set_mask(self, row: Int, index: Int, parents: RowPointer, window_left: Int):
        """The bits of the request's row `index` and its ancestors; the window counts positions, not slots."""
        var at = row * Int(self.mask_bytes)
        var first = row - index
        var seen = index
        var left = window_left
        while seen >= 0 and seen < self.mask_bits():
            self.mask[unsafe_offset=at + seen // 8] |= UInt8(1) << UInt8(seen % 8)
            if left == 0:
                return
            left -= 1
            seen = parent_of(parents, first, seen)


@always_inline
def parent_of(parents: RowPointer, first: Int, index: Int) -> Int:
    """The parent of the request's row `index`, -1 for none; so is one that is not before it."""
    var parent = Int(parents[unsafe_offset=first + index])
    return parent if parent >= -1 and parent < index else -1


def fill_tree_rows(
    rows: TreeRows,
    parents: RowPointer,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int,
    window_left: Int,
) raises:
    """Fills all rows of `rows`; those past the last request's are padding.

    Offsets were checked (`check_offsets`). A parent that is not -1 or an earlier row of its request, and a tree that the
    mask has no bits for, are refused.
    """
    for request in range(batch):
        var first = Int(row_offsets[unsafe_offset=request])
        var cached = Int(cache_lengths[unsafe_offset=request])
        for row in range(first, Int(row_offsets[unsafe_offset=request + 1])):
            var index = row - first
            var parent = Int(parents[unsafe_offset=row])
            if parent < -1 or parent >= index:
                raise Error(
                    "parents: row ",
                    row,
                    " (request ",
                    request,
                    ", its row ",
                    index,
                    ") has parent ",
                    parent,
                    ", expected -1 or an earlier row of the request",
                )
            var depth = 0
            if parent >= 0:
                depth = Int(rows.positions[unsafe_offset=first + parent]) - cached + 1
            rows.set(row, request, index, depth, cached)
            rows.clear_mask(row)
            if depth != index:
                if index >= rows.mask_bits():
                    raise Error(
                        "parents: row ",
                        row,
                        " (request ",
                        request,
                        ") is row ",
                        index,
                        " of its tree; masks were planned for trees of up to ",
                        rows.mask_bits(),
                        " rows",
                    )
                rows.set_mask(row, index, parents, window_left)
    for row in range(Int(row_offsets[unsafe_offset=batch]), Int(rows.num_rows)):
        rows.pad(row)
