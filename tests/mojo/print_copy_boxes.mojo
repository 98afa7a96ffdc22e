"""Prints the boxes that the Hopper kernel copies: gpu_compile/test_hopper.py compares them with NumPy's indexing.

Its arguments are the number of tokens, then the page table of one request for pages of 8 slots, which serves larger
pages as well. A line is: page_size begin end first_token_of_the_box slots row_of_the_tile page slot
"""

from std.sys import argv

from mojo_ops.attention.gpu.hopper.producer import find_box
from mojo_ops.attention.gpu.hopper.tiles import CopyBox, ItemTiles
from support import page_table_of, untracked


comptime POOL = 1000
"""Pages of the pool that the ids are drawn from."""


def main() raises:
    var arguments = argv()
    var tokens = Int(arguments[1])
    var table = List[UInt32]()
    for i in range(2, len(arguments)):
        table.append(UInt32(Int(arguments[i])))
    for page_size in [8, 16, 24, 48, 64, 96, 128, 256]:
        var pages = page_table_of(untracked(table), POOL, page_size)
        var box = CopyBox.of_page(page_size)
        for begin in [0, 1, 17, 63, 64, 200]:
            for end in [begin + 1, begin + 64, tokens - 1, tokens]:
                var tiles = ItemTiles.of(Int32(begin), Int32(end), box)
                for tile in range(tiles.count):
                    for lane in range(tiles.valid_rows(tile).boxes(box)):
                        var at = find_box(tiles, tile, pages, box, lane)
                        var row = lane << box.bits
                        print(page_size, begin, end, tiles.token(tile) + row, box.slots(), row, at.page, at.slot)
    _ = table^
