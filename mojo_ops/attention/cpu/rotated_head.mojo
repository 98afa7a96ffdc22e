"""Rotates one head, a query or a key, from its own dtype to that which a kernel takes (`rotary_keys.mojo`).

Vectors take rotated heads as float32. For matrix tiles an element is the sum of three bfloat16, and a dot product is as
exact as in float32 with the six largest of their nine products: rotated heads are six times as long, those of queries
`high high high middle middle low`, those of keys `high middle low high middle high`.
"""

from ...isa.convert import ChunkConstants, LANES, chunk_of, load_chunk, narrow, to_chunk_order, widen
from ...isa.memory import FloatPointer

comptime TAIL = 4
"""Half of head_dim is a multiple of it."""
comptime BF16_PRODUCTS = 6
"""Products of bfloat16 that make one product."""


def parts_of(dtype: DType) -> Int:
    """The length of a rotated head, as a multiple of P, of the dtype that a kernel takes: float32 or bfloat16."""
    return BF16_PRODUCTS if dtype == DType.bfloat16 else 1


def part_of_key(product: Int) -> Int:
    """Return which part of a key a product takes: 0 is what rounding to bfloat16 gives, 1 and 2 what it left."""
    return product % 3 if product != 5 else 0


def part_of_query(product: Int) -> Int:
    return product // 3 + product // 5


@always_inline
def rotate_head[
    dtype: DType, to: DType, //, kv_dtype: DType, stored: Bool
](
    source: Pointer[Scalar[dtype], _],
    constants: ChunkConstants[dtype],
    half: Int,
    angles: FloatPointer,
    padded_half: Int,
    target: Pointer[Scalar[to], MutUntrackedOrigin],
    padded_dim: Int,
):
    """Rotates one head, in the order that `RotaryTables` says.

    Parameters:
        dtype: The dtype of the head.
        to: The dtype of the rotated head.
        kv_dtype: The dtype of the cache, which decides about the order.
        stored: Whether it is a key of the cache, else a query.

    Args:
        source: The head, `[D]`.
        constants: The constants of `load_chunk`; not used for a query.
        half: D / 2.
        angles: Cosines, then sines, `[2, padded_half]`.
        padded_half: H.
        target: The rotated head.
        padded_dim: P.
    """
    comptime chunk = chunk_of(kv_dtype)
    if half % chunk == 0:
        for d in range(0, half, chunk):
            var a: SIMD[DType.float32, chunk]
            var b: SIMD[DType.float32, chunk]
            comptime if stored:
                a = rebind[type_of(a)](load_chunk[True](source.unsafe_offset(d), chunk, constants))
                b = rebind[type_of(b)](load_chunk[True](source.unsafe_offset(half + d), chunk, constants))
            else:
                a = to_chunk_order[kv_dtype](widen[chunk](source.unsafe_offset(d)))
                b = to_chunk_order[kv_dtype](widen[chunk](source.unsafe_offset(half + d)))
            store_rotated[stored](a, b, angles.unsafe_offset(d), padded_half, target.unsafe_offset(d), half, padded_dim)
        return
    var d = 0
    comptime for width in [LANES, TAIL]:
        while d + width <= half:
            var a = widen[width](source.unsafe_offset(d))
            var b = widen[width](source.unsafe_offset(half + d))
            store_rotated[stored](a, b, angles.unsafe_offset(d), padded_half, target.unsafe_offset(d), half, padded_dim)
            d += width


@always_inline
def store_rotated[
    to: DType, //, stored: Bool
](
    a: SIMD[DType.float32, _],
    b: type_of(a),
    angles: FloatPointer,
    padded_half: Int,
    target: Pointer[Scalar[to], MutUntrackedOrigin],
    half: Int,
    padded_dim: Int,
):
    """Rotates some elements of the first half of a head and those of the second that belong to them."""
    var c = angles.unsafe_load[width=a.length]()
    var s = angles.unsafe_load[width=a.length](padded_half)
    store_parts[stored](a.fma(c, -b * s), target, padded_dim)
    store_parts[stored](b.fma(c, a * s), target.unsafe_offset(half), padded_dim)


@always_inline
def store_parts[
    to: DType, //, stored: Bool
](x: SIMD[DType.float32, _], target: Pointer[Scalar[to], MutUntrackedOrigin], padded_dim: Int):
    """Stores rotated elements, those of a key or else of a query, as the kernel takes them."""
    comptime if to == DType.float32:
        target.unsafe_store(0, x.cast[to]())
    else:
        var parts = Array[SIMD[to, x.length], 3](fill=0)
        var rest = x
        comptime for i in range(3):
            parts[i] = narrow[to](rest)
            rest -= parts[i].cast[DType.float32]()
        comptime for product in range(BF16_PRODUCTS):
            comptime part = part_of_key(product) if stored else part_of_query(product)
            target.unsafe_store(product * padded_dim, parts[part])
