"""Pointers into memory that the caller owns: the fields of a view, which owns nothing."""

comptime RowPointer = Pointer[Int32, ImmUntrackedOrigin]
"""A number for each row of a call: its request, position or length."""
comptime TablePointer = Pointer[UInt32, ImmUntrackedOrigin]
"""Entries of a page table, or a number for each request."""


@always_inline
def untracked[T: AnyType](pointer: Pointer[T, _]) -> Pointer[T, MutUntrackedOrigin]:
    """The same address, without the origin that a view's field cannot hold."""
    return pointer.unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()


@always_inline
def untracked_immutable[T: AnyType](pointer: Pointer[T, _]) -> Pointer[T, ImmUntrackedOrigin]:
    """As `untracked`, for memory that is only read."""
    return pointer.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()


@always_inline
def memory_at[dtype: DType](address: Int) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """Memory that a call changes, at an address."""
    var at = address
    return Pointer(to=at).unsafe_bitcast[Pointer[Scalar[dtype], MutUntrackedOrigin]]()[]


@always_inline
def constant_at[dtype: DType](address: Int) -> Pointer[Scalar[dtype], ImmUntrackedOrigin]:
    """Memory that a call only reads, at an address."""
    var at = address
    return Pointer(to=at).unsafe_bitcast[Pointer[Scalar[dtype], ImmUntrackedOrigin]]()[]
