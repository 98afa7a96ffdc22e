"""The producer of the kernel for many rows: the warp that copies pages of K and V to shared memory."""

from std.sys import size_of
from max.gpu import lane_id
from max.gpu.host.nvidia.tma import TMADescriptor

from ....cache.tensor_map import copy_box
from ..row_page_table import RowPageTable
from ..hopper.producer import find_box
from ..hopper.tiles import CopyBox, ItemTiles
from .shared_memory import RowsMemory


@always_inline
def produce_tiles[
    dtype: DType, head_dim: Int, //
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    shared: RowsMemory[dtype, head_dim],
    first_tile: Int32,
    tiles: ItemTiles,
    pages: RowPageTable,
    box: CopyBox,
    k_atom: Int32,
    v_atom: Int32,
):
    """By one warp: copies K and V of every tile of an item into the ring, of which `first_tile` tiles are behind it.

    K of the block's tile t is fill 2 t, V is 2 t + 1. Lane i starts the copies of box i, whose page it has looked up one
    tile before. `k_atom` and `v_atom` are the KV head's first in the maps.
    """
    comptime Map = shared.Map
    var lane = Int32(lane_id())
    var offset = Map.Tile.box_offset(Int(lane << box.bits))
    var next = find_box(tiles, 0, pages, box, lane)
    for tile in range(tiles.count):
        var at = next
        next = find_box(tiles, tile + 1, pages, box, lane)
        # The copy engine fills a page outside the map with zeros; rows that see its tokens become NaN.
        if lane < 8:
            shared.outside(first_tile + tile).unsafe_store(Int(lane), UInt8(1 if at.page < 0 else 0))
        var boxes = tiles.valid_rows(tile).boxes(box)
        var bytes = (boxes << box.bits) * Int32(head_dim * size_of[dtype]())
        var fill = 2 * (first_tile + tile)
        with shared.ring().produce(fill, bytes) as stage:
            if lane < boxes:
                var to = shared.at[UInt8](stage.index * Map.TILE_BYTES + offset)
                copy_box(k_map, to, stage.full, at.page, at.slot, k_atom)
        with shared.ring().produce(fill + 1, bytes) as stage:
            if lane < boxes:
                var to = shared.at[UInt8](stage.index * Map.TILE_BYTES + offset)
                copy_box(v_map, to, stage.full, at.page, at.slot, v_atom)
