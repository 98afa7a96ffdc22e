"""Formats of a cache of codes: few bits an element, and behind the codes of each head one float32, their scale.

A new one is its name in `KVFormat` and a row of `TABLE` here, and a struct in `FORMATS` of mojo_ops/isa/codes.mojo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

KVFormat = Literal["int8", "int4"]
"""Names that users give: those of dtypes of NumPy or `ml_dtypes`."""

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Codes:
    """A format of codes: its memory, and its arithmetic in NumPy, which the kernels match to the bit."""

    memory: str
    """The dtype of the arrays that the codes lie in, by which the kernels tell formats apart."""
    per_number: int
    """Codes in one number of `memory`."""
    least_head: int
    """The least head_dim: of less, a head with its scale would be no smaller than without any code."""
    greatest: int
    """The greatest magnitude of a code."""
    scale: Callable[[Floats, Floats], Array]
    """The scales of heads, by the greatest and the least of their elements."""
    pack: Callable[[Floats], Array]
    """Elements `[..., D]` over their scale as numbers of `memory` `[..., D / per_number]`."""
    unpack: Callable[[Array], Array]
    """The codes `[..., D]` in numbers of `memory`."""


_GREATEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""That of int8: 127 times it is finite."""


def _int4_numbers(x: Floats) -> Array:
    """Byte i holds elements 2 i (low half) and 2 i + 1, in two's complement."""
    codes = np.minimum(np.rint(x), 7).astype(np.int8)
    return ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(np.uint8)


def _int4_codes(numbers: Array) -> Array:
    pairs = numbers.view(np.int8)
    return np.stack([pairs << 4, pairs], -1).reshape(*pairs.shape[:-1], -1) >> 4


TABLE: dict[str, Codes] = {
    "int8": Codes(
        memory="int8",
        per_number=1,
        least_head=8,
        greatest=127,
        scale=lambda most, least: np.minimum(np.maximum(most, -least) / np.float32(127), _GREATEST_SCALE),
        pack=lambda x: np.minimum(np.rint(x), 127).astype(np.int8),
        unpack=lambda numbers: numbers,
    ),
    "int4": Codes(
        memory="uint8",
        per_number=2,
        least_head=16,
        greatest=8,
        scale=lambda most, least: np.where(most > -least, most, least) / np.float32(-8),  # the greatest becomes -8
        pack=_int4_numbers,
        unpack=_int4_codes,
    ),
}
CODE_DTYPES: tuple[KVFormat, ...] = get_args(KVFormat)
"""Names of caches of codes, under any of `options.Q_DTYPES`."""
FORMATS: dict[str, KVFormat] = {TABLE[name].memory: name for name in CODE_DTYPES}
"""Formats of codes, by the name of the dtype of the array that they lie in."""
