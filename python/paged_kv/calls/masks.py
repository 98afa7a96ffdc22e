"""Masks of attention: bits a row and token, dense or packed to bytes, in FlashInfer's arrangement.

Request b has a bit for each of its `q_lens[b]` rows and `kv_lens[b]` tokens, row after row; its bits begin at a whole
byte. Letters in shapes: B requests, N bits of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import one_of
from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST, as_indices
from paged_kv.calls.offsets import Indices, check_offsets, offsets_of
from paged_kv.calls.rows import RowMasks
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
BitOrder = Literal["big", "little"]

_WHY_HOST = "its bits are packed on the host"


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The bits of every request, and where each request's begin. Nothing of it is the caller's memory."""

    bits: Bytes
    """`[bytes]`, the lowest bit of a byte first."""
    indptr: Int64s
    """`[B + 1]`, in bytes: request b's are `bits[indptr[b] : indptr[b + 1]]`, the last bits of the last unused."""

    def of_rows(self, batch: Indices, qo_indptr: Indices, kv_lens: Indices) -> RowMasks:
        """Return where each row's bits begin: row r is the `r - qo_indptr[b]`-th of request `b = batch[r]`."""
        row_in_request = np.arange(len(batch)) - qo_indptr[batch]
        return RowMasks(self.bits, 8 * self.indptr[batch] + row_in_request * kv_lens[batch].astype(np.int64))

    def check(self, q_lens: Indices, kv_lens: Indices, names: tuple[str, str]) -> None:
        """Refuses bytes that do not hold every request's bits.

        Raises:
            ContractError: a request's bytes begin before the first or end after the last; messages call bits and
                indptr `names`.
        """
        ends = self.indptr[:-1] + segment_bytes(q_lens, kv_lens)
        wrong = (self.indptr[:-1] < 0) | (ends > len(self.bits))
        if wrong.any():
            b = int(wrong.argmax())
            raise ContractError(
                f"{names[1]}: the bits of request {b} are bytes {self.indptr[b]} to {ends[b]},"
                f" {names[0]} has {len(self.bits)}"
            )


def segment_bytes(q_lens: Indices, kv_lens: Indices) -> Int64s:
    """`[B]`, bytes of each request's bits."""
    return -(-q_lens.astype(np.int64) * kv_lens // 8)


def packed_mask(custom_mask: Any, packed_custom_mask: Any, q_lens: Indices, kv_lens: Indices) -> PackedMask | None:
    """The mask of a call that gives it dense or packed; packed is what counts where both are given.

    Args:
        custom_mask: bool: `[N]`, or `[q_len, kv_len]` of one request; or None.
        packed_custom_mask: `[bytes]` uint8, as `segment_packbits` makes it with bitorder "little"; or None.
        q_lens, kv_lens: `[B]`.

    Raises:
        ContractTypeError: it is no array of this dtype on the host.
        ShapeError: it has not a bit for each row and token.
    """
    lengths = segment_bytes(q_lens, kv_lens)
    indptr = offsets_of(lengths)
    if packed_custom_mask is not None:
        devices.require_host(packed_custom_mask, "packed_custom_mask", _WHY_HOST)
        packed = HOST.view(packed_custom_mask, "packed_custom_mask")
        if packed.dtype != np.uint8:
            raise ContractTypeError(f"packed_custom_mask: expected dtype uint8, got {packed.dtype}")
        if packed.shape != (indptr[-1],):
            raise ShapeError(
                f"packed_custom_mask: shape {list(packed.shape)}, expected [{indptr[-1]}]: the bytes of each request's"
                " q_len * kv_len bits, as segment_packbits(..., bitorder='little') makes them"
            )
        return PackedMask(packed.copy(), indptr)
    if custom_mask is None:
        return None
    dense = bits_of(custom_mask, "custom_mask", only_bool=True)
    sizes = q_lens.astype(np.int64) * kv_lens
    shapes: list[tuple[int, ...]] = [(int(sizes.sum()),)]
    if len(q_lens) == 1:
        shapes.append((int(q_lens[0]), int(kv_lens[0])))
    if dense.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(
            f"custom_mask: expected shape {expected}, q_len * kv_len of each request, got {list(dense.shape)}"
        )
    return PackedMask(pack_segments(dense.reshape(-1), offsets_of(sizes), "little"), indptr)


def bits_of(array: Any, name: str, *, only_bool: bool) -> npt.NDArray[np.bool_]:
    """A view of an array of bits on the host, as bool.

    Raises:
        ContractTypeError: it is no such array; with `only_bool` numbers are none.
    """
    devices.require_host(array, name, _WHY_HOST)
    view = HOST.view(array, name)
    if only_bool and view.dtype != np.bool_:
        raise ContractTypeError(f"{name}: expected dtype bool (whether a row sees a token), got {view.dtype}")
    return view if view.dtype == np.bool_ else view.astype(np.bool_)


def checked_bits(x: Any, bitorder: Any) -> tuple[npt.NDArray[np.bool_], BitOrder]:
    """The arguments of `packbits`, checked.

    Raises:
        ContractTypeError: x is no array on the host.
        ShapeError: it has not one dimension.
        ContractError: bitorder is neither "big" nor "little".
    """
    one_of("bitorder", bitorder, ("big", "little"))
    bits = bits_of(x, "x", only_bool=False)
    if bits.ndim != 1:
        raise ShapeError(f"x: expected one dimension, got shape {list(bits.shape)}")
    return bits, "big" if bitorder == "big" else "little"


def checked_segments(indptr: Any, num_bits: int) -> Indices:
    """The offsets `[B + 1]` of `segment_packbits`, checked.

    Raises:
        ContractTypeError: it is no array of integers on the host.
        ShapeError, PageTableError: its first is not 0, it decreases, or it does not end at `num_bits`.
    """
    devices.require_host(indptr, "indptr", _WHY_HOST)
    offsets = as_indices(indptr, "indptr")
    check_offsets(offsets, "indptr")
    if offsets[-1] != num_bits:
        raise ShapeError(f"indptr: expected an end at x's {num_bits} entries, got {offsets[-1]}")
    return offsets


def pack_segments(bits: npt.NDArray[np.bool_], offsets: Sequence[int] | np.ndarray, bitorder: BitOrder) -> Bytes:
    """The bytes of each segment `bits[offsets[i] : offsets[i + 1]]`, one after the other; each begins a byte."""
    ends = np.asarray(offsets, np.int64)
    if not (ends % 8).any():
        return np.packbits(bits, bitorder=bitorder)
    counts = np.diff(ends)
    begins = offsets_of(-(-counts // 8) * 8)
    padded = np.zeros(begins[-1], np.bool_)
    for begin, first, count in zip(begins.tolist(), ends.tolist(), counts.tolist(), strict=False):
        padded[begin : begin + count] = bits[first : first + count]
    return np.packbits(padded, bitorder=bitorder)
