"""Products with quantised weights in groups of 32 and of 16: compiled for AMX by tests/isa, never run."""

from std.sys import argv

from mojo_ops.linear.quantised.amx import configure_group_tiles
from mojo_ops.linear.quantised.block_encodings import Q6_K, Q8_0
from mojo_ops.linear.quantised.multiply import multiply_on_tiles
from mojo_ops.linear.quantised.tile import BytePointer, Coming, Tile


def main():
    var some = len(argv())
    var at = BytePointer(unsafe_from_address=64 * some)
    var sums = at.unsafe_bitcast[SIMD[DType.float32, 16]]()
    var coming = Coming(at, some)
    configure_group_tiles()
    multiply_on_tiles[Q8_0](Tile(at), at, sums, coming, at)
    multiply_on_tiles[Q6_K](Tile(at), at, sums, coming, at)
