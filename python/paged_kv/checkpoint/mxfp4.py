"""MXFP4 (OCP Microscaling 1.0), as GPT-OSS's experts are stored: 32 values of 4 bits and one scale of 8 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAN = 0xFF
"""A scale of E8M0 that is no number."""


def blocks_of(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes `[..., G, 16]`, each byte of which holds two values that follow one another, and their scales `[..., G]` as
    blocks `[..., 17 G]` of GGUF's order: the scale, and 16 bytes of values `i` and `i + 16`.

    The first value of a byte is in its low bits in both.
    """
    result = np.empty((*scales.shape, 17), np.uint8)
    result[..., 0] = scales
    first, second = codes[..., :8], codes[..., 8:]
    result[..., 1::2] = first & 15 | second << 4
    result[..., 2::2] = first >> 4 | second & 0xF0
    return result.reshape(*scales.shape[:-1], -1)
