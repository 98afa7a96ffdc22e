"""The rows of one attention call, as every kernel takes them."""

from std.utils.numerics import isfinite

from ..cache.pointers import RowPointer


@fieldwise_init
struct AttentionRows[dtype: DType](TrivialRegisterPassable):
    """The rows of one call: the queries, their requests and lengths, and their outputs."""

    var q: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, D]`."""
    var o: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, D]`."""
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

    def check(self) raises:
        if not isfinite(self.v_scale):
            raise Error("v_scale must be finite, not ", self.v_scale)
        if not isfinite(self.rope_theta) or self.rope_theta < 0:
            raise Error("rope_theta must be finite and positive (0 = off), not ", self.rope_theta)
        if not isfinite(self.rope_scale) or self.rope_scale <= 0:
            raise Error("rope_scale must be finite and positive, not ", self.rope_scale)
