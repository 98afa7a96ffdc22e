"""The producer of the Hopper kernel: the warp that copies pages of K and V to shared memory."""

from std.sys import size_of
from max.gpu import lane_id
from max.gpu.host.nvidia.tma import TMADescriptor

from ....cache.tensor_map import copy_box
from ..row_page_table import RowPageTable, TokenSlot
from .pipeline import BlockSharedMemory, Ring
from .shared_memory import SharedMemoryMap
from .tiles import CopyBox, ItemTiles


@always_inline
def produce[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    shared: BlockSharedMemory[kv_dtype, head_dim, heads],
    ring: Ring[SharedMemoryMap[kv_dtype, head_dim, heads].STAGES],
    tiles: ItemTiles,
    pages: RowPageTable,
    box: CopyBox,
    k_atom: Int32,
    v_atom: Int32,
):
    """By one warp: copies K and V of every tile into the ring, K of tile t as fill 2 t, V as 2 t + 1.

    Lane i looks up the page of the tile's i-th box, one tile before its copies, and starts them. `k_atom` and `v_atom`
    are the KV head's first in the maps.
    """
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    var lane = Int32(lane_id())
    var offset = Map.box_offset(Int(lane << box.bits))
    var next = find_box(tiles, 0, pages, box, lane)
    for tile in range(tiles.count):
        var at = next
        if at.page < 0:
            # The copy engine fills a page outside the map with zeros; the row becomes NaN.
            shared.status()[] = 1
        next = find_box(tiles, tile + 1, pages, box, lane)
        var boxes = tiles.valid_rows(tile).boxes(box)
        var bytes = (boxes << box.bits) * Int32(head_dim * size_of[kv_dtype]())
        with ring.produce(2 * tile, bytes) as stage:
            if lane < boxes:
                var to = shared.at[UInt8](stage.index * Map.STAGE_BYTES + offset)
                copy_box(k_map, to, stage.full, at.page, at.slot, k_atom)
        with ring.produce(2 * tile + 1, bytes) as stage:
            if lane < boxes:
                var to = shared.at[UInt8](stage.index * Map.STAGE_BYTES + offset)
                copy_box(v_map, to, stage.full, at.page, at.slot, v_atom)


@always_inline
def find_box(tiles: ItemTiles, tile: Int32, pages: RowPageTable, box: CopyBox, lane: Int32) -> TokenSlot:
    """Return where the tile's `lane`-th box lies; (0, 0) where the tile does not need it."""
    if tile < tiles.count:
        if lane < tiles.valid_rows(tile).boxes(box):
            # The box's first token may lie before `begin`, in the same page: the row has that page.
            return pages.locate(tiles.token(tile) + (lane << box.bits))
    return TokenSlot(0, 0)
