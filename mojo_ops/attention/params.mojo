"""The rows of one attention call, as every kernel takes them."""

from std.utils.numerics import isfinite

from ..cache.pointers import RowPointer
from .logits import Logits
from .row_masks import MASK_TOKENS, NoMasks, RowMasks, bits_between


@fieldwise_init
struct AttentionRows[dtype: DType, o_dtype: DType = dtype, Masks: RowMasks = NoMasks](TrivialRegisterPassable):
    """The rows of one call: the queries, their requests and lengths, and their outputs.

    Parameters:
        dtype: The dtype of q.
        o_dtype: The dtype of o.
        Masks: What rows see of their tokens beside their lengths.
    """

    var q: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, D]`."""
    var o: Pointer[Scalar[Self.o_dtype], MutUntrackedOrigin]
    """`[R, Hq, Dv]`."""
    var lse: Pointer[Float32, MutUntrackedOrigin]
    """`[R, Hq]`, base 2."""
    var row_batch: RowPointer
    """`[R]`: the row's request; -1 for a row of padding."""
    var row_lengths: RowPointer
    """`[R]`: the tokens a row may see, its own included."""
    var num_rows: Int
    var num_heads: Int
    """Query heads; a multiple of the cache's KV heads."""
    var v_scale: Float32
    """Multiplies the output."""
    var rope_theta: Float32
    """Base of the rotary embedding of q and of the cached keys; 0 = none."""
    var rope_scale: Float32
    """Divides the rotary frequencies."""
    var masks: Self.Masks
    var q_latent: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, Dv]`: in latent attention, the part of each query that meets V; else not read."""
    var latent_scale: Float32
    """In latent attention, multiplies the dot product with V before that of q with K is added."""

    @always_inline
    def from_head(self, head: Int, head_dim: Int, value_dim: Int) -> Self:
        """The same rows, whose first query head is `head`."""
        var part = self
        part.q = self.q.unsafe_offset(head * head_dim)
        part.o = self.o.unsafe_offset(head * value_dim)
        part.lse = self.lse.unsafe_offset(head)
        return part

    def check(self) raises:
        if not isfinite(self.v_scale):
            raise Error("v_scale must be finite, not ", self.v_scale)
        if not isfinite(self.rope_theta) or self.rope_theta < 0:
            raise Error("rope_theta must be finite and positive (0 = off), not ", self.rope_theta)
        if not isfinite(self.rope_scale) or self.rope_scale <= 0:
            raise Error("rope_scale must be finite and positive, not ", self.rope_scale)

    @always_inline
    def length(self, row: Int) -> Int:
        """The tokens that a row may see: 0 for one of padding."""
        return Int(self.row_lengths[unsafe_offset=row]) if self.row_batch[unsafe_offset=row] >= 0 else 0

    @always_inline
    def position(self, row: Int) -> Int:
        """The position of a row's token."""
        var request = Int(self.row_batch[unsafe_offset=row])
        return self.masks.position(row, request, Int(self.row_lengths[unsafe_offset=row]))

    @always_inline
    def first_token(self, row: Int, logits: Logits) -> Int:
        """The first token inside the window of a row that is not padding."""
        var request = Int(self.row_batch[unsafe_offset=row])
        return first_in_window(self.masks, row, request, Int(self.row_lengths[unsafe_offset=row]), logits)

    @always_inline
    def seen_bits(self, row: Int, token: Int, logits: Logits) -> UInt32:
        """Bit `i` says whether a row that is not padding sees `token + i`."""
        var range = bits_between(token, self.first_token(row, logits), Int(self.row_lengths[unsafe_offset=row]))
        return range & self.masks.mask_bits(row, token) if range != 0 else 0

    @always_inline
    def sees(self, row: Int, token: Int, logits: Logits) -> Bool:
        """Return whether a row that is not padding sees a token."""
        return self.seen_bits(row, token, logits) & 1 == 1

    def sees_any(self, row: Int, logits: Logits) -> Bool:
        """Return whether a row sees a token."""
        var length = self.length(row)
        comptime if not Self.Masks.has_masks:
            return length > 0
        else:
            if length > 0:
                for token in range(self.first_token(row, logits), length, MASK_TOKENS):
                    if self.seen_bits(row, token, logits) != 0:
                        return True
            return False


@always_inline
def first_in_window[Masks: RowMasks, //](masks: Masks, row: Int, request: Int, length: Int, logits: Logits) -> Int:
    """The first token inside the window of a row of `length` tokens; `length` where there is none."""
    comptime if Masks.has_masks:
        # The window counts back from the row's position, which the pages need not reach.
        return min(length, logits.first_token(masks.position(row, request, length) + 1 - masks.offset(request)))
    else:
        return logits.first_token(length)
