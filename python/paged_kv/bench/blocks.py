"""Random weights in blocks of each encoding, and what they mean, by the formats' definitions.

Those of grids and of base 3 are random bits, whose meaning the `gguf` package knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.graphs.encodings import TABLE, Encoding

Array = npt.NDArray[Any]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _scales(rng: np.random.Generator, shape: Sequence[int], least: float) -> tuple[Array, Array]:
    """One a block, up to twice the least: float16 `[..., 1]` as bytes, and float32."""
    d = rng.uniform(least, 2 * least, (*shape, 1)).astype(np.float16)
    return d.view(np.uint8), d.astype(np.float32)


def _nibbles(rng: np.random.Generator, shape: Sequence[int]) -> tuple[Array, Array]:
    """`[..., 32]` of 0 to 15, and two of them a byte, 16 elements apart."""
    q = rng.integers(0, 16, (*shape, 32), np.uint8)
    return q, q[..., :16] | q[..., 16:] << 4


def _q4_0(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), (q, pairs) = _scales(rng, shape, 1e-3), _nibbles(rng, shape)
    return [stored, pairs], d * (q.astype(np.float32) - 8)


def _q4_1(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    head, step, low = _scales_and_mins(rng, shape, 4)
    q, pairs = _nibbles(rng, shape)
    return [*head, pairs], step * q - low


def _q5_0(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), (q, parts) = _scales(rng, shape, 5e-4), _fives(rng, shape)
    return [stored, *parts], d * (q.astype(np.float32) - 16)


def _q5_1(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    head, step, low = _scales_and_mins(rng, shape, 5)
    q, parts = _fives(rng, shape)
    return [*head, *parts], step * q - low


def _scales_and_mins(rng: np.random.Generator, shape: Sequence[int], bits: int) -> tuple[list[Array], Array, Array]:
    """Two of a block: how they are stored, the step of its weights, and what is taken from them, 0 on average."""
    (step, d), (_, other) = _scales(rng, shape, 0.016 / 2**bits), _scales(rng, shape, 0.016 / 2**bits)
    low = (other * ((2**bits - 1) / 2)).astype(np.float16)
    return [step, (-low).view(np.uint8)], d, low.astype(np.float32)


def _fives(rng: np.random.Generator, shape: Sequence[int]) -> tuple[Array, list[Array]]:
    """`[..., 32]` of 0 to 31: the fifth bit of each, and the lower ones as of `_nibbles`."""
    q, pairs = _nibbles(rng, shape)
    fifths = rng.integers(0, 2, q.shape, np.uint8)
    return q | fifths << 4, [np.packbits(fifths, -1, "little"), pairs]


def _iq4_nl(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), (q, pairs) = _scales(rng, shape, 1e-4), _nibbles(rng, shape)
    return [stored, pairs], d * _IQ4[q]


def _mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    exponents, (q, pairs) = rng.integers(116, 120, (*shape, 1), np.uint8), _nibbles(rng, shape)
    return [exponents, pairs], np.concatenate([_FP4, -_FP4])[q] * np.ldexp(1, exponents.astype(np.int32) - 127)


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


def _q8_0(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    (stored, d), q = _scales(rng, shape, 1e-4), rng.integers(-127, 128, (*shape, 32), np.int8)
    return [stored, q.view(np.uint8)], d * q


def _q2_k(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    """16 groups of 16, whose scales and minimums have 4 bits."""
    d = (rng.uniform(5e-4, 1e-3, (*shape, 2)) * (1, 1.5)).astype(np.float16)  # 0 on average
    scales, mins = rng.integers(0, 16, (2, *shape, 16), np.uint8)
    q, low = _twos(rng, shape)
    step, least = (part * d[..., i, None].astype(np.float32) for i, part in enumerate((scales, mins)))
    return [scales | mins << 4, low, d.view(np.uint8)], step[..., None] * q - least[..., None]


def _q3_k(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    """16 groups of 16, whose scales of 6 bits have a sign."""
    (stored, d), (q, low) = _scales(rng, shape, 5e-5), _twos(rng, shape)
    third, scales = rng.integers(0, 2, q.shape, np.uint8), rng.integers(0, 64, (*shape, 16), np.uint8)
    high = np.packbits(third.reshape(*shape, 8, 32), -2, "little")  # of runs of 32
    lower = scales[..., :8] & 15 | (scales[..., 8:] & 15) << 4
    upper = np.bitwise_or.reduce(scales.reshape(*shape, 4, 4) >> 4 << _BITS, axis=-2)
    values = (d * (scales.astype(np.float32) - 32))[..., None] * ((q | third << 2).astype(np.float32) - 4)
    return [high, low, lower, upper, stored], values


_BITS = 2 * np.arange(4, dtype=np.uint8)[:, None]
"""The places of four numbers of 2 bits in a byte."""


def _twos(rng: np.random.Generator, shape: Sequence[int]) -> tuple[Array, Array]:
    """`[..., 16, 16]` of 0 to 3: of halves of 128 elements, four runs of 32 share 32 bytes."""
    q = rng.integers(0, 4, (*shape, 2, 4, 32), np.uint8)
    return q.reshape(*shape, 16, 16), np.bitwise_or.reduce(q << _BITS, axis=-2)


def _q4_k(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    head, values, pairs, _ = _k_groups(rng, shape, 4)
    return [*head, pairs], values


def _q5_k(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    head, values, pairs, high = _k_groups(rng, shape, 5)
    return [*head, high, pairs], values


def _k_groups(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> tuple[list[Array], Array, Array, Array]:
    """8 groups of 32, whose scales and minimums have 4 bits: the upper ones are 0."""
    least = 2e-3 / 2**bits
    d = (rng.uniform(least, 2 * least, (*shape, 2)) * (1, (2**bits - 1) / 2)).astype(np.float16)  # 0 on average
    scales, mins = rng.integers(1, 16, (2, *shape, 8), np.uint8)
    q = rng.integers(0, 2**bits, (*shape, 8, 32), np.uint8)
    upper = scales[..., 4:] | mins[..., 4:] << 4
    pairs = q[:, :, 0::2] & 15 | (q[:, :, 1::2] & 15) << 4  # two groups share 32 bytes
    high = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=-2)
    step, low = (part[..., None] * d[..., i, None, None].astype(np.float32) for i, part in enumerate((scales, mins)))
    return [d.view(np.uint8), scales[..., :4], mins[..., :4], upper], step * q - low, pairs, high


def _q6_k(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    """16 groups of 16, whose scales have a sign."""
    stored, d = _scales(rng, shape, 5e-5)
    scales, q = rng.integers(-16, 17, (*shape, 16), np.int8), rng.integers(0, 64, (*shape, 2, 4, 32), np.uint8)
    low = q[..., :2, :] & 15 | (q[..., 2:, :] & 15) << 4  # of halves of 128 elements, four runs of 32
    high = np.bitwise_or.reduce(q >> 4 << _BITS, axis=-2)
    values = (d * scales)[..., None] * (q.reshape(*shape, 16, 16).astype(np.float32) - 32)
    return [low, high, scales.view(np.uint8), stored], values


def _iq4_xs(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[list[Array], Array]:
    """8 groups of 32, whose scales of 6 bits have a sign."""
    (stored, d), (q, pairs) = _scales(rng, shape, 1e-5), _nibbles(rng, (*shape, 8))
    scales = rng.integers(0, 64, (*shape, 8), np.uint8)
    upper = np.bitwise_or.reduce(scales.astype(np.uint16) >> 4 << 2 * np.arange(8, dtype=np.uint16), axis=-1)
    lower = scales[..., 0::2] & 15 | (scales[..., 1::2] & 15) << 4
    values = (d * (scales.astype(np.float32) - 32))[..., None] * _IQ4[q]
    return [stored, upper[..., None].view(np.uint8), lower, pairs], values


_RANDOM_BLOCKS: dict[Encoding, tuple[int, Callable[..., tuple[list[Array], Array]]]] = {
    "Q4_0": (32, _q4_0), "Q4_K": (256, _q4_k), "Q5_K": (256, _q5_k), "Q6_K": (256, _q6_k), "Q8_0": (32, _q8_0),
    "IQ4_NL": (32, _iq4_nl), "IQ4_XS": (256, _iq4_xs), "MXFP4": (32, _mxfp4), "INT4": (32, _int4), "INT8": (32, _int8),
    "Q4_1": (32, _q4_1), "Q5_0": (32, _q5_0), "Q5_1": (32, _q5_1), "Q2_K": (256, _q2_k), "Q3_K": (256, _q3_k),
    "NVFP4": (64, _nvfp4), "Q1_0": (128, _q1_0),
}  # fmt: skip
"""Elements of a block, and what makes blocks `[rows, blocks]`: the parts of their bytes, and what they mean."""


def random_blocks(encoding: Encoding, rng: np.random.Generator, rows: int, elements: int) -> tuple[Array, Array]:
    """Random weights in blocks, uint8 `[rows, bytes]`, and what they mean, float32 `[rows, elements]`."""
    if encoding not in _RANDOM_BLOCKS:
        return _random_bits(encoding, rng, rows, elements)
    size, make = _RANDOM_BLOCKS[encoding]
    shape = (rows, elements // size)
    parts, values = make(rng, shape)
    blocks = np.concatenate([part.reshape(*shape, -1) for part in parts], axis=-1)
    return blocks.reshape(rows, -1), values.astype(np.float32).reshape(rows, elements)


_SCALES: dict[Encoding, float] = {
    "TQ1_0": 0.02, "TQ2_0": 0.02, "IQ1_S": 1e-3, "IQ1_M": 1e-3, "IQ2_XXS": 1e-4, "IQ2_XS": 1e-4, "IQ2_S": 1e-4,
    "IQ3_XXS": 5e-5, "IQ3_S": 1e-4,
}  # fmt: skip
"""The least scales of blocks whose other bits are random."""


def _random_bits(encoding: Encoding, rng: np.random.Generator, rows: int, elements: int) -> tuple[Array, Array]:
    import gguf  # only for these, so that the others need no package

    block = TABLE[encoding]
    blocks = rng.integers(0, 256, (rows * elements // block.elements, block.bytes), np.uint8)
    stored, _ = _scales(rng, (len(blocks),), _SCALES[encoding])
    if encoding == "IQ1_M":  # 4 bits each at the top of four numbers of 16
        parts = stored.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) << 12
        blocks[:, -8:] = (blocks[:, -8:].copy().view(np.uint16) & 0xFFF | parts).view(np.uint8)
    for at in block.scales:
        blocks[:, at : at + 2] = stored
    blocks = blocks.reshape(rows, -1)
    return blocks, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[encoding])
