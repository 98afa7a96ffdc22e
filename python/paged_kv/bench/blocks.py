"""Random weights in blocks of each encoding, and what they mean.

Of those that the `gguf` package reads all bits but scales are random; the others are made by the formats' definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.graphs.encodings import TABLE, Encoding

Array = npt.NDArray[Any]

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_LEAST: dict[Encoding, float] = {
    "Q4_0": 1e-3, "Q4_1": 1e-3, "Q5_0": 5e-4, "Q5_1": 5e-4, "Q8_0": 1e-4, "Q2_K": 5e-4, "Q3_K": 5e-5, "Q4_K": 3e-5,
    "Q5_K": 1.5e-5, "Q6_K": 6e-6, "IQ4_NL": 1e-4, "IQ4_XS": 1e-5, "TQ1_0": 0.02, "TQ2_0": 0.02, "IQ1_S": 1e-3,
    "IQ1_M": 1e-3, "IQ2_XXS": 1e-4, "IQ2_XS": 1e-4, "IQ2_S": 1e-4, "IQ3_XXS": 5e-5, "IQ3_S": 1e-4,
}  # fmt: skip
"""The least scale of a block: weights are some hundredths."""
_OFFSETS: dict[Encoding, float] = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""The other number of a block in units of its scale, with which weights are 0 on average."""


def _scales(rng: np.random.Generator, shape: Sequence[int], least: float) -> tuple[Array, Array]:
    """One a block, up to twice the least: float16 `[..., 1]` as bytes, and float32."""
    d = rng.uniform(least, 2 * least, (*shape, 1)).astype(np.float16)
    return d.view(np.uint8), d.astype(np.float32)


def _nibbles(rng: np.random.Generator, shape: Sequence[int]) -> tuple[Array, Array]:
    """`[..., 32]` of 0 to 15, and two of them a byte, 16 elements apart."""
    q = rng.integers(0, 16, (*shape, 32), np.uint8)
    return q, q[..., :16] | q[..., 16:] << 4


def _nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    """4 groups of 16, whose scales are 2 to the power of 0 to 3."""
    number = rng.uniform(1e-3, 2e-3, (*shape, 1)).astype(np.float32)
    powers, q = rng.integers(0, 4, (*shape, 4), np.uint8), rng.integers(0, 16, (*shape, 4, 16), np.uint8)
    steps = number * np.ldexp(np.float32(1), powers.astype(np.int32))
    stored = [number.view(np.uint8), powers + 7 << 3, q[..., :8] | q[..., 8:] << 4]
    return stored, steps[..., None] * np.concatenate([_FP4, -_FP4])[q]


def _q1_0(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), q = _scales(rng, shape, 0.01), rng.integers(0, 2, (*shape, 128), np.uint8)
    return [stored, np.packbits(q, -1, "little")], d * (2 * q.astype(np.float32) - 1)


def _int4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), (q, pairs) = _scales(rng, shape, 1e-3), _nibbles(rng, shape)
    zeros = rng.integers(4, 12, (*shape, 1), np.uint8)
    return [stored, zeros, np.zeros_like(zeros), pairs], d * (q.astype(np.float32) - zeros)


def _int8(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    stored, d = _scales(rng, shape, 1e-4)
    zeros, q = (rng.integers(-end, end, (*shape, n), np.int8) for end, n in ((8, 1), (120, 32)))
    parts = [stored, *(part.view(np.uint8) for part in (zeros, np.zeros_like(zeros), q))]
    return parts, d * (q.astype(np.float32) - zeros)


_OWN: dict[Encoding, tuple[int, Callable[..., tuple[list[Array], Array]]]] = {
    "NVFP4": (64, _nvfp4), "Q1_0": (128, _q1_0), "INT4": (32, _int4), "INT8": (32, _int8),
}  # fmt: skip
"""Elements of a block, and what makes blocks `[rows, blocks]`: the parts of their bytes, and what they mean."""


def random_blocks(encoding: Encoding, rng: np.random.Generator, rows: int, elements: int) -> tuple[Array, Array]:
    """Random weights in blocks, uint8 `[rows, bytes]`, and what they mean, float32 `[rows, elements]`."""
    if encoding not in _OWN:
        return _random_bits(encoding, rng, rows, elements)
    size, make = _OWN[encoding]
    shape = (rows, elements // size)
    parts, values = make(rng, shape)
    blocks = np.concatenate([part.reshape(*shape, -1) for part in parts], axis=-1)
    return blocks.reshape(rows, -1), values.astype(np.float32).reshape(rows, elements)


def _random_bits(encoding: Encoding, rng: np.random.Generator, rows: int, elements: int) -> tuple[Array, Array]:
    import gguf  # only for these, so that the others need no package

    block = TABLE[encoding]
    blocks = rng.integers(0, 256, (rows * elements // block.elements, block.bytes), np.uint8)
    if encoding == "MXFP4":
        blocks[:, 0] = rng.integers(116, 120, len(blocks))  # an exponent
    else:
        stored, d = _scales(rng, (len(blocks),), _LEAST[encoding])
        if encoding == "IQ1_M":  # 4 bits each at the top of four numbers of 16
            parts = stored.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) << 12
            blocks[:, -8:] = (blocks[:, -8:].copy().view(np.uint16) & 0xFFF | parts).view(np.uint8)
        for at, factor in zip(block.scales, (1, _OFFSETS.get(encoding)), strict=False):
            blocks[:, at : at + 2] = (d * factor).astype(np.float16).view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    return blocks, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[encoding])
