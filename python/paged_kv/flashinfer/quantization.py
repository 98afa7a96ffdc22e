"""Bits packed to bytes, for masks of attention: names and meaning of FlashInfer's `quantization` module.

Arrays are torch, NumPy, JAX or MAX arrays in the memory of the CPU; results have the kind of the first argument.
"""

from __future__ import annotations

import numpy as np

from paged_kv.arrays.host import like
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.masks import checked_bits, checked_segments, pack_segments
from paged_kv.calls.offsets import offsets_of

__all__ = ["packbits", "segment_packbits"]


def packbits(x: ArrayT, bitorder: str = "big") -> ArrayT:
    """Packs an array of bits to bytes, as `numpy.packbits`.

    Args:
        x: `[N]` bool, or numbers: all but 0 are a set bit.
        bitorder: "big": the first bit is a byte's highest; "little": its lowest, as masks of attention have it.

    Returns:
        `[ceil(N / 8)]` uint8; the last byte is filled with zeros.

    Raises:
        ContractTypeError: x is no array on the CPU.
        ShapeError: it has not one dimension.
        ContractError: bitorder is neither of the two.
    """
    bits, order = checked_bits(x, bitorder)
    return like(x, np.packbits(bits, bitorder=order))


def segment_packbits(x: ArrayT, indptr: SupportsDLPack, bitorder: str = "big") -> tuple[ArrayT, ArrayT]:
    """Packs each segment of an array of bits to bytes of its own.

    Args:
        x: `[indptr[B]]` bool, or numbers: all but 0 are a set bit.
        indptr: `[B + 1]`, any integer dtype, from 0: segment i is `x[indptr[i]:indptr[i + 1]]`.
        bitorder: As in `packbits`.

    Returns:
        The bytes `[bytes]` uint8 and their offsets `[B + 1]` int32: segment i became
        `y[new_indptr[i]:new_indptr[i + 1]]`, which are `ceil(bits / 8)` bytes.

    Raises:
        ContractTypeError: an argument is no array on the CPU, or indptr's dtype is no integer.
        ShapeError, PageTableError: x has not one dimension; indptr does not begin at 0, decreases, or does not end at
            the length of x.
        ContractError: bitorder is neither of the two.
    """
    bits, order = checked_bits(x, bitorder)
    offsets = checked_segments(indptr, len(bits))
    new_indptr = offsets_of(-(-np.diff(offsets) // 8)).astype(np.int32)
    return like(x, pack_segments(bits, offsets, order)), like(x, new_indptr)
