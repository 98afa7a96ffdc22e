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
](shared: BlockSharedMemory[kv_dtype, head_dim, heads], stage: Int, to: Int, valid: TileRows):
    """A float8 tile to float16, swizzled; the values of rows that are not valid become 0, as in `zero_other_rows`.

    The last products that read `to` are complete: barriers of the consumers lie in between (as for the weights).
    """
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    comptime per_token = head_dim // 16
    comptime assert WGMMA_TILE_TOKENS * per_token % CONSUMER_THREADS == 0, "every thread takes as many pieces"
    comptime for round in range(WGMMA_TILE_TOKENS * per_token // CONSUMER_THREADS):
        var i = round * CONSUMER_THREADS + Int(thread_idx.x)
        var token, piece = divmod(i, per_token)
        var stored = shared.at[Scalar[kv_dtype]](stage * Map.STAGE_BYTES + i * 16).unsafe_load[width=16, alignment=16]()
        var widened = stored.cast[DType.float16]()
        comptime if is_value:
            if Int32(token) < valid.begin or Int32(token) >= valid.end:
                widened = 0
        comptime for half in range(2):
            shared.at[Float16](to + Map.widened_offset(token, 2 * piece + half)).unsafe_store[alignment=CHUNK_BYTES](
                widened.slice[8, offset=half * 8]()
            )
