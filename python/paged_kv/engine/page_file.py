"""The file of one page or state of the disk tier: its tokens, and bits that only the model that computed them can use.

A safetensors file with two tensors: `tokens` `[page_size]` int64, and `pages` `[1, ...]`, the bits of a page, of a page
of windows or of a state as unsigned integers. Its metadata says what they are of; a reader compares all of it, and the
SHA-256 of the tensors, which detects damage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from paged_kv.arguments import printable
from paged_kv.errors import CheckpointError

FORMAT = "paged-kv prefix 1"
_DIGEST = "sha256"

Bits = npt.NDArray[Any]
"""Whole pages or states, `[n, ...]`, their elements as unsigned integers."""


class BitsKind(NamedTuple):
    """The kind of `Bits`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """The shape of each of them."""


class PagedModel(Protocol):
    """The part of a model that its files depend on (`model.DecoderModel`)."""

    page_size: int
    num_states: int
    """Slots of state; 0 where no layer is recurrent."""
    num_window_pages: int
    """Pages of the layers with windows; 0 where they have none of their own."""

    @property
    def digest(self) -> str:
        """SHA-256 of weights and geometry, in hexadecimal."""
        ...

    @property
    def kernels(self) -> str:
        """The kernels that computed the pages: other kernels round otherwise."""
        ...

    @property
    def page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The dtype of a page's elements, and its shape."""
        ...

    @property
    def window_page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The same of a page of the layers with windows."""
        ...

    def read_pages(self, pages: Sequence[int], *, windows: bool = False) -> Bits:
        """The bits of some pages, or of some of the layers with windows."""
        ...

    def write_pages(self, pages: Sequence[int], bits: Bits, *, windows: bool = False) -> None:
        """Replaces some pages by what `read_pages` gave."""
        ...

    @property
    def state_size(self) -> int:
        """Elements of a state, all float32."""
        ...

    def read_states(self, slots: Sequence[int]) -> Bits:
        """The bits of some slots of state."""
        ...

    def write_states(self, slots: Sequence[int], bits: Bits) -> None:
        """Replaces some slots of state by what `read_states` gave."""
        ...


def page_bits(model: PagedModel, *, windows: bool = False) -> BitsKind:
    """The unsigned integers that a page's elements are stored as, and its shape; or those of a page of windows."""
    dtype, shape = model.window_page_kind if windows else model.page_kind
    return BitsKind(np.dtype(f"uint{8 * _itemsize(dtype)}"), shape)


def state_bits(model: PagedModel) -> BitsKind:
    """The same of a state."""
    return BitsKind(np.dtype(np.uint32), (model.state_size,))


def metadata_of(model: PagedModel) -> dict[str, str]:
    """The metadata of all files of a model, without the digest of a file's content."""
    dtype, shape = model.page_kind
    return {
        "format": FORMAT,
        "model": model.digest,
        "dtype": dtype,
        "page_size": str(model.page_size),
        "page_shape": "x".join(map(str, shape)),
    }


def pack(tokens: npt.NDArray[np.int64], bits: Bits, metadata: Mapping[str, str]) -> bytes:
    """The content of a file."""
    tensors = {"tokens": np.asarray(tokens, np.int64), "pages": bits}
    return save(tensors, {**metadata, _DIGEST: _digest(tensors["tokens"], bits)})


def unpack(
    name: str, data: bytes, kind: BitsKind, page_size: int, metadata: Mapping[str, str]
) -> tuple[npt.NDArray[np.int64], Bits]:
    """The tokens and the bits `[1, ...]` of what `pack` gave.

    Raises:
        CheckpointError: the file, which messages call `name`, is damaged or has other metadata than `metadata`.
    """
    try:
        tensors = load(data)
        stored = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        tokens, bits = tensors["tokens"], tensors["pages"]
        digest = _digest(tokens, bits)
        for field, expected in {**metadata, _DIGEST: digest}.items():
            if stored[field] != expected:
                raise CheckpointError(f"{name}: {field}: expected {expected}, got {printable(stored[field])}")
    except CheckpointError:
        raise
    except Exception as error:  # damage of any kind, as several parsers report it
        raise CheckpointError(f"{name}: cannot be read: {printable(error)}") from None
    layout = {each: (str(tensor.dtype), tensor.shape) for each, tensor in tensors.items()}
    expected_layout = {"tokens": ("int64", (page_size,)), "pages": (str(kind.dtype), (1, *kind.shape))}
    if layout != expected_layout:
        raise CheckpointError(f"{name}: expected tensors {expected_layout}, got {layout}")
    return tokens, bits


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)


def _digest(tokens: npt.NDArray[Any], bits: Bits) -> str:
    """SHA-256 of the content of both arrays."""
    digest = hashlib.sha256()
    for array in (tokens, bits):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
