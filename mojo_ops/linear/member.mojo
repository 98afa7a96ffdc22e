"""One of several linear layers of the same x."""


@fieldwise_init
struct LinearMember[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The weights of a layer, and its result."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[n, k]`."""
    var n: Int
