"""MXFP4 (OCP Microscaling 1.0), as GPT-OSS's experts are stored: 32 values of 4 bits and one scale of 8 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAN = 0xFF
"""A scale of E8M0 that is no number."""
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)
"""Of each code of E2M1: a sign, two bits of exponent and one of mantissa."""
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)
"""The two values of each byte: its low bits are the first."""


def unpack(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The values `[..., 32 * G]` of blocks `[..., G, 16]` and their scales `[..., G]`, exact but for an overflow.

    A value is that of its code times 2^(scale - 127). Past float32's largest it is infinity; scales are not `NAN`.
    """
    with np.errstate(over="ignore"):
        factors = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
        values = _PAIRS[blocks].reshape(*blocks.shape[:-1], 2 * blocks.shape[-1]) * factors[..., None]
    return values.reshape(*scales.shape[:-1], -1)
