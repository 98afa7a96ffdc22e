"""Row masks: the tokens that a call's rows see, beside their lengths: positions, offsets and masks."""

from std.memory import bitcast

from ..cache.pointers import RowPointer

comptime MASK_TOKENS = 32
"""Tokens whose mask bits are read at once."""
comptime MaskPointer = Pointer[UInt8, ImmUntrackedOrigin]
comptime StartPointer = Pointer[Int64, ImmUntrackedOrigin]
comptime ALL_BITS = UInt32.MAX


trait RowMasks(TrivialRegisterPassable):
    """Positions of a call's rows and tokens, and the tokens that a mask hides."""

    comptime has_masks: Bool
    """True if rows may have positions, offsets and masks: False for decode and causal prefill."""

    def position(self, row: Int, request: Int, length: Int) -> Int:
        """The position of a row's token."""
        ...

    def offset(self, request: Int) -> Int:
        """The position of the first token of a request's pages; 0 for the request -1 of padding."""
        ...

    def mask_bits(self, row: Int, token: Int) -> UInt32:
        """Bit `i` says whether the row's mask shows it token `token + i`; bits past the row's length mean nothing."""
        ...

    def check(self, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, batch: Int) raises:
        """Refuses offsets and masks that do not fit the rows, whose requests and lengths were checked."""
        ...


struct NoMasks(RowMasks):
    """Rows that see all their tokens and stand at the last one: decode and causal prefill."""

    comptime has_masks = False

    def __init__(out self):
        pass

    @always_inline
    def position(self, row: Int, request: Int, length: Int) -> Int:
        return length - 1

    @always_inline
    def offset(self, request: Int) -> Int:
        return 0

    @always_inline
    def mask_bits(self, row: Int, token: Int) -> UInt32:
        return ALL_BITS

    def check(self, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, batch: Int) raises:
        pass


@fieldwise_init
struct CustomMasks(RowMasks):
    """The five operands of `paged_kv_masked_attention` that say what rows see. An absent one has no elements."""

    comptime has_masks = True

    var row_positions: RowPointer
    """`[R]`: the position of the row's token; absent: its length - 1, after the request's offset."""
    var has_positions: Bool
    var token_offsets: RowPointer
    """`[B]`: the position of the first token of a request's pages; absent: 0."""
    var has_offsets: Bool
    var mask: MaskPointer
    """`[mask_bytes]`: bits, the lowest of a byte first."""
    var mask_bytes: Int
    var mask_starts: StartPointer
    """`[R]`: the bit of the first token that the row's mask covers; -1: the row has no mask."""
    var has_starts: Bool
    var mask_firsts: RowPointer
    """`[R]`: the first token that the row's mask covers, those before it are seen; absent: 0."""
    var has_firsts: Bool

    def check(self, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, batch: Int) raises:
        """Checks the offsets of requests, and that each row's mask has a bit for every token that it covers."""
        if self.has_offsets:
            for request in range(batch):
                if self.offset(request) < 0:
                    raise Error("token_offsets: request ", request, " has ", self.offset(request))
        for row in range(num_rows):
            var request = Int(row_batch[unsafe_offset=row])
            var length = Int(row_lengths[unsafe_offset=row])
            if request < 0 or length == 0:
                continue
            if self.offset(request) + length > Int(Int32.MAX):
                raise Error("token_offsets: the last token of row ", row, " (request ", request, ") is past 2^31 - 1")
            var start = self.mask_start(row)
            if start == -1:
                continue
            if start < -1:
                raise Error("mask_starts: row ", row, " (request ", request, ") has ", start)
            var first = self.first_masked(row)
            if first < 0:
                raise Error("mask_firsts: row ", row, " (request ", request, ") has ", first)
            # A start near 2^63 must not pass 64 bits.
            if max(0, length - first) > 8 * self.mask_bytes - start:
                raise Error(
                    "mask: row ",
                    row,
                    " (request ",
                    request,
                    ") needs ",
                    max(0, length - first),
                    " bits from bit ",
                    start,
                    " on, it has ",
                    8 * self.mask_bytes,
                )

    @always_inline
    def offset(self, request: Int) -> Int:
        return Int(self.token_offsets[unsafe_offset=request]) if self.has_offsets and request >= 0 else 0

    @always_inline
    def position(self, row: Int, request: Int, length: Int) -> Int:
        if self.has_positions:
            return Int(self.row_positions[unsafe_offset=row])
        return length - 1 + self.offset(request)

    @always_inline
    def first_masked(self, row: Int) -> Int:
        """The first token that the row's mask covers."""
        return Int(self.mask_firsts[unsafe_offset=row]) if self.has_firsts else 0

    @always_inline
    def mask_start(self, row: Int) -> Int:
        """The bit of that token, or -1."""
        return Int(self.mask_starts[unsafe_offset=row]) if self.has_starts else -1

    def mask_bits(self, row: Int, token: Int) -> UInt32:
        var start = self.mask_start(row)
        if start < 0:
            return ALL_BITS
        var covered = token - self.first_masked(row)
        if covered >= 0:
            return self.read(start + covered)
        if covered <= -MASK_TOKENS:
            return ALL_BITS
        return self.read(start) << UInt32(-covered) | ((UInt32(1) << UInt32(-covered)) - 1)

    @always_inline
    def read(self, bit: Int) -> UInt32:
        """The 32 bits of the mask from `bit` on; 0 past its end."""
        var byte = bit >> 3
        var word: UInt64
        if byte + 8 <= self.mask_bytes:
            word = bitcast[DType.uint64, 1](self.mask.unsafe_load[width=8](byte))
        else:
            word = 0
            for i in range(max(0, self.mask_bytes - byte)):
                word |= UInt64(self.mask[unsafe_offset=byte + i]) << UInt64(8 * i)
        return UInt32(word >> UInt64(bit & 7) & 0xFFFFFFFF)


@always_inline
def bits_between(token: Int, begin: Int, end: Int) -> UInt32:
    """Bit `i` says whether `token + i` is one of the tokens `[begin, end)`."""
    if end <= token or begin >= token + MASK_TOKENS:
        return 0
    var bits = ALL_BITS
    if begin > token:
        bits = bits << UInt32(begin - token)
    if end < token + MASK_TOKENS:
        bits &= (UInt32(1) << UInt32(end - token)) - 1
    return bits
