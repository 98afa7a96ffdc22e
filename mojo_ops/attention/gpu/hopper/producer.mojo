"""The producer of the Hopper kernel: the warp that copies pages of K and V to shared memory."""

from std.sys import size_of
from max.gpu import lane_id
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.primitives import warp

from ....cache.tensor_map import copy_box
from ..row_page_table import RowPageTable, TokenSlot
from .pipeline import BlockSharedMemory, Ring, RingStage
from .shared_memory import SharedMemoryMap
from .tiles import CopyBox, ItemTiles
from .wgmma import ATOM_ELEMENTS


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
    kv_head: Int32,
):
    """By one warp: copies K and V of every tile into the ring, K of tile t as fill 2 t, V as 2 t + 1.

    Lane i looks up the page of the tile's i-th box, one tile before its copies; lane 0 starts the copies.
    """
    var lane = Int32(lane_id())
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
            copy_boxes(k_map, shared, stage, at, boxes, box, kv_head)
        with ring.produce(2 * tile + 1, bytes) as stage:
            copy_boxes(v_map, shared, stage, at, boxes, box, kv_head)


@always_inline
def find_box(tiles: ItemTiles, tile: Int32, pages: RowPageTable, box: CopyBox, lane: Int32) -> TokenSlot:
    """Where the tile's `lane`-th box lies; (0, 0) where the tile does not need it."""
    if tile < tiles.count:
        if lane < tiles.valid_rows(tile).boxes(box):
            # The box's first token may lie before `begin`, in the same page: the row has that page.
            return pages.locate(tiles.token(tile) + (lane << box.bits))
    return TokenSlot(0, 0)


@always_inline
def copy_boxes[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    map: TMADescriptor,
    shared: BlockSharedMemory[kv_dtype, head_dim, heads],
    stage: RingStage,
    at: TokenSlot,
    boxes: Int32,
    box: CopyBox,
    kv_head: Int32,
):
    """Starts the copies of a tile's boxes; lane i has the page and slot of box i."""
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    for i in range(boxes):
        var page = warp.shuffle_idx(at.page, UInt32(i))
        var first_slot = warp.shuffle_idx(at.slot, UInt32(i))
        if lane_id() == 0:
            comptime for copy in range(1 if Map.WIDENED else Map.ATOMS):
                copy_box(
                    map,
                    shared.at[UInt8](stage.index * Map.STAGE_BYTES + Map.box_offset(Int(i << box.bits), copy)),
                    stage.full,
                    Int(page),
                    Int(first_slot),
                    Int(kv_head),
                    copy * ATOM_ELEMENTS,
                )
