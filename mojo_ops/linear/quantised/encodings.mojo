"""The table of all encodings, and what a graph says of them."""

from std.builtin.variadics import TypeList

from ...cache.checks import check_equal
from .block_encodings import (
    INT4,
    INT8,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
)
from .encoding import Encoding
from .grid_encodings import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS

comptime ENCODINGS = TypeList.of[
    Trait=Encoding,
    Q4_0,
    Q8_0,
    IQ4_NL,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_XS,
    MXFP4,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    INT4,
    INT8,
    TQ1_0,
    TQ2_0,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    NVFP4,
    Q1_0,
]()
"""All of them, in the order of their indices: that of `TABLE` in graphs/encodings.py."""
comptime BLOCK_ENCODINGS = block_encodings()
"""The bits of the encodings for which x is rounded by blocks of 256."""


def block_encodings() -> Int:
    var bits = 0
    comptime for i in range(ENCODINGS.length):
        comptime assert ENCODINGS[i].INDEX == i, "an encoding is not where its index says"
        bits |= Int(ENCODINGS[i].ROUNDS_BLOCKS) << i
    return bits


def encodings_mask(encodings: Int, count: Int) -> Int:
    """The bits of `count` encodings, each of which is 5 bits of a number, the first the lowest."""
    var mask = 0
    for i in range(count):
        mask |= 1 << encoding_of(encodings, i)
    return mask


@always_inline
def encoding_of(encodings: Int, i: Int) -> Int:
    """The encoding of member `i`."""
    return (encodings >> (5 * i)) & 31


def check_row_bytes(found: Int, encoding: Int, k: Int) raises:
    """Refuses rows of w that are not `k` elements."""
    comptime for i in range(ENCODINGS.length):
        check_row[ENCODINGS[i]](found, encoding, k)


def check_row[E: Encoding](found: Int, encoding: Int, k: Int) raises:
    if encoding == E.INDEX:
        if k % E.BLOCK_ELEMENTS:
            raise Error("x: its second dimension is ", k, ", no multiple of the ", E.BLOCK_ELEMENTS, " of a block")
        check_equal("w: the bytes of a row", found, k // E.BLOCK_ELEMENTS * (E.BYTES * E.BLOCK_ELEMENTS // 256))
