"""The tokens of its request that a row sees, and their positions: what differs between the ops of attention."""

from ...cache.pointers import RowPointer
from ..row_masks import CustomMasks, MaskPointer, StartPointer
from .split_kv import INVALID_ROW, RowTokens


@fieldwise_init
struct RowMask(TrivialRegisterPassable):
    """The place of a row's bits in the mask of a call."""

    var start: Int64
    """-1: the row has no mask."""
    var first: Int32
    """The token of the first bit; the row sees those before it."""


trait GpuRowMasks(TrivialRegisterPassable):
    """As kernels take it, by value."""

    comptime has_masks: Bool
    """True if rows may have masks and positions, and V a width, of their own."""

    @always_inline
    def tokens(
        self, row: Int32, request: Int32, length: Int32, batch: Int32, capacity: Int32, window_left: Int32
    ) -> RowTokens:
        """The tokens that a row attends to, a mask left out; arguments as of `RowTokens.of`."""
        ...

    @always_inline
    def position(self, row: Int32, request: Int32, length: Int32) -> Int32:
        """The position of the row's own token."""
        ...

    @always_inline
    def first_position(self, request: Int32) -> Int32:
        """The position of the first token of a request's pages."""
        ...

    @always_inline
    def mask(self, row: Int32) -> RowMask:
        ...

    @always_inline
    def sees(self, mask: RowMask, token: Int32) -> Bool:
        """Return whether a row's mask lets it see a token that it attends to."""
        ...

    @always_inline
    def value_dim(self, head_dim: Int32) -> Int32:
        """Elements of a head of V and of o, where one of K has `head_dim`."""
        ...


@fieldwise_init
struct GpuNoMasks(GpuRowMasks):
    """A row sees the first tokens of its request and stands at the last of them. Nothing is stored."""

    comptime has_masks = False

    @always_inline
    def tokens(
        self, row: Int32, request: Int32, length: Int32, batch: Int32, capacity: Int32, window_left: Int32
    ) -> RowTokens:
        return RowTokens.of(request, length, batch, capacity, window_left)

    @always_inline
    def position(self, row: Int32, request: Int32, length: Int32) -> Int32:
        return length - 1

    @always_inline
    def first_position(self, request: Int32) -> Int32:
        return 0

    @always_inline
    def mask(self, row: Int32) -> RowMask:
        return RowMask(-1, 0)

    @always_inline
    def sees(self, mask: RowMask, token: Int32) -> Bool:
        return True

    @always_inline
    def value_dim(self, head_dim: Int32) -> Int32:
        return head_dim


@fieldwise_init
struct GpuCustomMasks(GpuRowMasks):
    """`CustomMasks` with fixed-width fields, and V's width. Every pointer is device memory."""

    comptime has_masks = True

    var row_positions: RowPointer
    """`[R]`: the position of the row's token; without it, that of the last token of its length."""
    var token_offsets: RowPointer
    """`[B]`: the position of the first token of each request's pages; without it 0."""
    var mask_bytes: MaskPointer
    var mask_starts: StartPointer
    """`[R]`: the row's first bit; -1 for a row without a mask."""
    var mask_firsts: RowPointer
    """`[R]`: the token of that bit; without it 0."""
    var mask_bits: Int64
    """The bits of the whole mask; a token whose bit lies past them is not seen."""
    var v_dim: Int32
    var has_positions: Int32
    var has_offsets: Int32
    var has_starts: Int32
    var has_firsts: Int32

    @staticmethod
    def of(masks: CustomMasks, v_dim: Int) -> Self:
        return Self(
            masks.row_positions,
            masks.token_offsets,
            masks.mask,
            masks.mask_starts,
            masks.mask_firsts,
            Int64(8 * masks.mask_bytes),
            Int32(v_dim),
            Int32(masks.has_positions),
            Int32(masks.has_offsets),
            Int32(masks.has_starts),
            Int32(masks.has_firsts),
        )

    @always_inline
    def tokens(
        self, row: Int32, request: Int32, length: Int32, batch: Int32, capacity: Int32, window_left: Int32
    ) -> RowTokens:
        var all = RowTokens.of(request, length, batch, capacity, -1)
        if all.end <= 0:
            return all
        var first = Int64(self.first_position(request))
        var position = Int64(self.position(row, request, length))
        var mask = self.mask(row)
        var bad_mask = mask.start < -1 or (mask.start >= 0 and mask.first < 0)
        if first < 0 or first + Int64(length) > Int64(Int32.MAX) or bad_mask:
            return RowTokens(0, INVALID_ROW)
        if window_left < 0:
            return all
        # A window that ends behind the last token leaves none: the item is empty.
        var begin = max(Int64(0), position - Int64(window_left) - first)
        return RowTokens(Int32(min(begin, Int64(length))), length)

    @always_inline
    def position(self, row: Int32, request: Int32, length: Int32) -> Int32:
        if self.has_positions != 0:
            return self.row_positions[unsafe_offset=Int(row)]
        return self.first_position(request) + (length - 1)

    @always_inline
    def first_position(self, request: Int32) -> Int32:
        return self.token_offsets[unsafe_offset=Int(request)] if self.has_offsets != 0 else 0

    @always_inline
    def mask(self, row: Int32) -> RowMask:
        return RowMask(
            self.mask_starts[unsafe_offset=Int(row)] if self.has_starts != 0 else -1,
            self.mask_firsts[unsafe_offset=Int(row)] if self.has_firsts != 0 else 0,
        )

    @always_inline
    def sees(self, mask: RowMask, token: Int32) -> Bool:
        if mask.start < 0 or token < mask.first:
            return True
        var index = Int64(token - mask.first)
        if index >= self.mask_bits - mask.start:
            return False
        var bit = mask.start + index
        return (self.mask_bytes[unsafe_offset=Int(bit >> 3)] >> UInt8(bit & 7)) & 1 != 0

    @always_inline
    def value_dim(self, head_dim: Int32) -> Int32:
        return self.v_dim
