"""Weights in blocks: the encodings of GGUF that the kernels multiply by, and two of this package's own.

A new one is a row of `TABLE` and a struct at the same place of `ENCODINGS` in
mojo_ops/linear/quantised/encodings.mojo, with random blocks for tests and benchmarks in
python/paged_kv/bench/blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged_kv.errors import ShapeError

Encoding = Literal[
    "Q4_0", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K",
    "INT4", "INT8", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "NVFP4", "Q1_0",
]  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block of one encoding, along a row of the weight."""

    elements: int
    bytes: int
    scales: tuple[int, ...] = (0,)
    """Offsets of its float16 numbers: a file in which one is not finite is refused."""
    gguf: int | None = None
    """The encoding's number in GGUF files; None where it is this package's own."""
    gguf_bytes: int | None = None
    """Bytes of a block in these files, where they are put together when they are loaded; None: as many."""


TABLE: dict[Encoding, Block] = {
    "Q4_0": Block(32, 18, gguf=2),
    "Q8_0": Block(32, 34, gguf=8),
    "IQ4_NL": Block(32, 18, gguf=20),
    "Q4_K": Block(256, 144, (0, 2), gguf=12),
    "Q5_K": Block(256, 176, (0, 2), gguf=13),
    "Q6_K": Block(256, 210, (208,), gguf=14),
    "IQ4_XS": Block(256, 136, gguf=23),
    "MXFP4": Block(32, 17, (), gguf=39),  # begins with a byte, a power of two
    "Q4_1": Block(32, 20, (0, 2), gguf=3),
    "Q5_0": Block(32, 22, gguf=6),
    "Q5_1": Block(32, 24, (0, 2), gguf=7),
    "Q2_K": Block(256, 84, (80, 82), gguf=10),
    "Q3_K": Block(256, 110, (108,), gguf=11),
    "INT4": Block(32, 20),
    "INT8": Block(32, 36),
    "TQ1_0": Block(256, 54, (52,), gguf=34),
    "TQ2_0": Block(256, 66, (64,), gguf=35),
    "IQ1_S": Block(256, 50, gguf=19),
    "IQ1_M": Block(256, 56, (), gguf=29),  # its number lies in four parts
    "IQ2_XXS": Block(256, 66, gguf=16),
    "IQ2_XS": Block(256, 74, gguf=17),
    "IQ2_S": Block(256, 82, gguf=22),
    "IQ3_XXS": Block(256, 98, gguf=18),
    "IQ3_S": Block(256, 110, gguf=21),
    "NVFP4": Block(64, 40, (), gguf=40, gguf_bytes=36),  # checkpoint/nvfp4.py
    "Q1_0": Block(128, 18, gguf=41),
}
"""In the order of their indices in the kernels. INT4 and INT8, blocks of 32 elements with a float16 scale and a zero,
are what GPTQ's kind of checkpoints is put into; a block of NVFP4 begins with the float32 number of its matrix."""
ENCODINGS: tuple[Encoding, ...] = tuple(TABLE)
GGUF_ENCODINGS: tuple[Encoding, ...] = tuple(name for name, block in TABLE.items() if block.gguf is not None)


def block_elements(encoding: Encoding) -> int:
    """Elements of a row in one block."""
    return TABLE[encoding].elements


def block_bytes(encoding: Encoding) -> int:
    """Bytes of a block."""
    return TABLE[encoding].bytes


def row_bytes(encoding: Encoding, elements: int) -> int:
    """Bytes of a row of so many elements.

    Raises:
        ShapeError: the row does not end with a block.
    """
    size = block_elements(encoding)
    if elements % size:
        raise ShapeError(f"elements: expected a multiple of {size}, those of a {encoding} block, got {elements}")
    return elements // size * block_bytes(encoding)
