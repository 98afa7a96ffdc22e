"""A tile in shared memory becomes an operand of wgmma: float8 is widened, rows outside the item become zeros."""

from max.gpu import thread_idx

from .pipeline import BlockSharedMemory
from .shared_memory import SharedMemoryMap
from .tiles import TileRows, WGMMA_TILE_TOKENS
from .wgmma import CHUNK_BYTES, CONSUMER_THREADS


@always_inline
def zero_other_rows[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](shared: BlockSharedMemory[kv_dtype, head_dim, heads], stage: Int, valid: TileRows):
    """Zeros for the values of rows that are not valid: their weight is 0, but 0 * NaN is NaN."""
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    for i in range(Int(thread_idx.x), Map.TILE_BYTES // CHUNK_BYTES, CONSUMER_THREADS):
        var row = Int32(Map.row_of_chunk(i))
        if row < valid.begin or row >= valid.end:
            # Whole rows, so that the order of their chunks does not matter.
            var at = stage * Map.STAGE_BYTES + i * CHUNK_BYTES
            shared.at[UInt32](at).unsafe_store[alignment=CHUNK_BYTES](SIMD[DType.uint32, 4](0))


@always_inline
def widen_tile[
    kv_dtype: DType, head_dim: Int, heads: Int, //, *, is_value: Bool
](shared: BlockSharedMemory[kv_dtype, head_dim, heads], thread: Int, stage: Int, to: Int, valid: TileRows):
    """A float8 tile to float16, swizzled; the values of rows that are not valid become 0, as in `zero_other_rows`.

    By a warpgroup, of which this is the `thread`-th. The last products that read `to` are complete in all of it: since
    then it has met at a barrier.
    """
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    comptime per_token = head_dim // 16
    comptime rows = CONSUMER_THREADS // per_token
    """Tokens a round: whole groups of 8, so that a thread's addresses of one round are those of another, moved."""
    comptime assert rows % 8 == 0 and WGMMA_TILE_TOKENS % rows == 0, "whole groups of rows in as many rounds"
    var first, piece = divmod(thread, per_token)
    var source = stage * Map.STAGE_BYTES + thread * 16
    var low = to + Map.widened_offset(first, 2 * piece)
    var high = to + Map.widened_offset(first, 2 * piece + 1)
    comptime for round in range(WGMMA_TILE_TOKENS // rows):
        comptime step = round * rows // 8 * Map.GROUP_BYTES
        var stored = shared.at[Scalar[kv_dtype]](source + round * CONSUMER_THREADS * 16).unsafe_load[
            width=16, alignment=16
        ]()
        var widened = stored.cast[DType.float16]()
        comptime if is_value:
            var token = Int32(round * rows + first)
            if token < valid.begin or token >= valid.end:
                widened = 0
        shared.at[Float16](low + step).unsafe_store[alignment=CHUNK_BYTES](widened.slice[8]())
        shared.at[Float16](high + step).unsafe_store[alignment=CHUNK_BYTES](widened.slice[8, offset=8]())
