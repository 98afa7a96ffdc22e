"""Hopper's matrix instruction, wgmma: its operands in shared memory, its results in registers.

The facts about swizzles, descriptors and fragments are those of the PTX manual (wgmma, "matrix descriptor").
"""

from std.sys._assembly import inlined_assembly
from max.gpu.compute.mma import wgmma_wait_group_sync

comptime WGMMA_K = 16
"""16-bit elements that one wgmma reduces over."""
comptime SWIZZLE_ROW_BYTES = 128
"""One token's share of a swizzle atom: a row of a tile."""
comptime ATOM_ELEMENTS = SWIZZLE_ROW_BYTES // 2
"""16-bit elements in a row."""
comptime SWIZZLE_PERIOD_BYTES = 8 * SWIZZLE_ROW_BYTES
"""The 128-byte swizzle repeats after these: rows of a tile are copied in groups of 8 only."""
comptime CHUNK_BYTES = 16
"""The unit that a swizzle permutes, and a row of a core matrix."""
comptime CORE_MATRIX_BYTES = 8 * CHUNK_BYTES
"""Bytes of an 8 x 8 matrix of 16-bit elements, the unit of an operand that is not swizzled."""
comptime CONSUMER_WARPS = 4
comptime CONSUMER_THREADS = 32 * CONSUMER_WARPS
"""Threads of the one warpgroup that computes."""


@fieldwise_init
struct MatrixOperand(TrivialRegisterPassable):
    """A matrix in shared memory as a wgmma reads it; all in bytes.

    | | leading | stride |
    |---|---|---|
    | swizzled, reduced dimension adjacent | unused | from 8 rows to the next 8 |
    | swizzled, other dimension adjacent | from 64 elements of it to the next 64 | from 8 of the reduced to the next 8 |
    | core matrices, reduced dimension adjacent | from 8 of the reduced to the next 8 | from 8 rows to the next 8 |
    | core matrices, other dimension adjacent | from 8 of the reduced to the next 8 | from 8 of it to the next 8 |
    """

    var start: Int
    var leading: Int
    var stride: Int
    var swizzled: Bool

    @always_inline
    def descriptor(self, base: UInt32) -> Int64:
        """The 64 bits that a wgmma takes, for a map that starts at `base`."""
        # Addresses are below 2^18; all are multiples of 16.
        var address = Int64((base + UInt32(self.start)) >> 4)
        var mode = 1 if self.swizzled else 0  # 1: 128 bytes
        return address | Int64((self.leading >> 4) << 16 | (self.stride >> 4) << 32 | mode << 62)


# A wgmma's result [64, columns]: element `i` of a thread's registers.


@always_inline
def fragment_row(thread: Int, i: Int) -> Int:
    """The row of element `i` of a warpgroup's thread: two rows a thread, 8 apart."""
    return (thread // 32) * 16 + (thread % 32) // 4 + ((i // 2) % 2) * 8


@always_inline
def fragment_column(thread: Int, i: Int) -> Int:
    """The column of element `i`: two adjacent ones of every 8."""
    return (i // 4) * 8 + (thread % 4) * 2 + i % 2


@always_inline
def pin_results(mut results: SIMD[DType.float32, _]):
    """Writes of the results that stand before this are not scheduled after it, uses that stand after it not before.

    Call it before `wgmma_fence_aligned` for all results of the products to come: the fence orders the writes of these
    registers before the products, but as an instruction that does not name them it holds no write back.
    """
    comptime for i in range(results.length):
        # A comment for the assembler; for the compiler an instruction that reads and writes the register.
        results[i] = inlined_assembly["// pinned $0", Float32, constraints="=f,0", has_side_effect=True](results[i])


@always_inline
def wait_for_products(mut results: SIMD[DType.float32, _]):
    """Waits for the products that were started; no use of the results may be scheduled before this."""
    wgmma_wait_group_sync[0]()
    pin_results(results)
