"""NVFP4: values of 4 bits (E2M1), a scale of 8 bits (E4M3) for each 16 of them, a float32 number for the matrix.

GGUF has 64 values in a block, four scales and 32 bytes, and the number in a tensor of its own. Here the number begins
each block: products and embeddings need nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAN = 0x7F
"""A scale of E4M3 that is no number."""
GGUF_BYTES = 36


def with_number(blocks: npt.NDArray[np.uint8], number: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """GGUF's blocks `[..., 36 B]` as this package's `[..., 40 B]`, with the number of each matrix `[...]` (of one, or
    as many dimensions as there are before the rows).

    Raises:
        ValueError: a scale is not finite.
    """
    parts = blocks.reshape(*blocks.shape[:-1], -1, GGUF_BYTES)
    with np.errstate(all="ignore"):
        largest = number * np.float32(448)  # the largest scale
    if not np.isfinite(largest).all() or ((parts[..., :4] & 0x7F) == NAN).any():
        raise ValueError("a scale is not finite")
    result = np.empty((*parts.shape[:-1], 4 + GGUF_BYTES), np.uint8)
    stored = np.ascontiguousarray(number, np.float32)[..., None].view(np.uint8)
    result[..., :4] = stored.reshape(*number.shape, *[1] * (parts.ndim - 1 - number.ndim), 4)
    result[..., 4:] = parts
    return result.reshape(*blocks.shape[:-1], -1)


def blocks_of(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes `[N, G, 8]`, each byte of which holds two values that follow one another, the first in its low bits, and
    their scales `[N, G]` as blocks `[N, 36 (G / 4)]` of GGUF: values `i` and `i + 8` share a byte. Its scales have
    no sign: that of a negative one goes into its values.
    """
    codes = codes ^ np.where(scales & 0x80, np.uint8(0x88), np.uint8(0))[..., None]
    result = np.empty((len(codes), scales.shape[1] // 4, GGUF_BYTES), np.uint8)
    result[..., :4] = scales.reshape(*result.shape[:2], 4) & 0x7F
    pairs = np.empty_like(codes)
    first, second = codes[..., :4], codes[..., 4:]
    pairs[..., 0::2] = first & 15 | second << 4
    pairs[..., 1::2] = first >> 4 | second & 0xF0
    result[..., 4:] = pairs.reshape(*result.shape[:2], 32)
    return result.reshape(len(codes), -1)
