"""Reads the header of a GGUF file (versions 2 and 3): its metadata, and where each tensor lies.

The format: "GGUF", version, number of tensors, number of metadata entries; the entries; for each tensor its name,
dimensions (the fastest first), encoding and offset; filling up to `general.alignment`; the tensors in that order, each
filled up. Little endian.
Strings in arrays are skipped: a vocabulary has hundreds of thousands of them, which take seconds to read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.config import checkpoint_path
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.errors import CheckpointError
from paged_kv.files import open_regular
from paged_kv.graphs.encodings import TABLE

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The types of metadata values, by their numbers.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # the format's own limits
_MAX_NAME = 65535
_LENGTH = struct.Struct("<Q")

_ENCODINGS = {
    **{
        block.gguf: (name, block.elements, block.gguf_bytes or block.bytes)
        for name, block in TABLE.items()
        if block.gguf is not None
    },
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    # Those that are refused, by name.
    42: ("Q2_0", 64, 18),
    9: ("Q8_1", 32, 36), 15: ("Q8_K", 256, 292), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8),
    # Those that ggml no longer has.
    4: ("Q4_2", 16, 10), 5: ("Q4_3", 16, 12), 31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18),
    33: ("Q4_0_8_8", 32, 18), 36: ("IQ4_NL_4_4", 32, 18), 37: ("IQ4_NL_4_8", 32, 18), 38: ("IQ4_NL_8_8", 32, 18),
}  # fmt: skip
"""By their number in a file: name, elements of a block and its bytes."""


@dataclass(frozen=True)
class Strings:
    """An array of strings, of which only the number is read before they are asked for."""

    count: int
    data: memoryview = field(default=memoryview(b""), repr=False, compare=False)
    """Their lengths, in 8 bytes, and bytes, one after another."""

    @cached_property
    def all(self) -> list[bytes]:
        """The strings, as they are in the file."""
        data, at = bytes(self.data), 0
        strings = []
        for _ in range(self.count):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(data, at)[0]
            strings.append(data[start:at])
        return strings


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the header describes it."""

    name: str
    encoding: str
    """GGUF's own name, such as "Q4_K" or "F16"."""
    shape: tuple[int, ...]
    """The shape in elements, the slowest dimension first: linear layers are `[out, in]`."""
    data: npt.NDArray[np.uint8]
    """Its bytes, `[out, bytes of a row]` where it has two dimensions: a view of the memory-mapped file. Empty where
    this package does not know the encoding's size."""
    transposed: bool = False
    """The last two dimensions of `shape` are those of the data in the other order: rows become columns when it is
    loaded."""


@dataclass(frozen=True)
class GgufHeader:
    """A file's header: all before its tensors' data."""

    file: Path
    metadata: Mapping[str, Any]
    """Numbers, booleans, strings, NumPy arrays of numbers, and `Strings`."""
    tensors: Mapping[str, GgufTensor]
    parts: tuple[Path, ...]
    """All files of the model, `file` first."""


def read_header(file: Path | str) -> GgufHeader:
    """The header of `file`, which stays mapped while its tensors' data is in use.

    Raises:
        CheckpointError: there is no such file; it is no GGUF file of version 2 or 3, is cut short, or contradicts
            itself.
    """
    path = checkpoint_path(file)
    try:
        with open_regular(path) as opened:
            # Private and writable: MAX copies what is read-only.
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    with file_errors(path):
        return _header(path, mapped)


def _header(path: Path, mapped: mmap.mmap) -> GgufHeader:
    reader = _Reader(path, mapped)
    if reader.take(4) != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file")
    version = reader.scalar("I")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version}; only little-endian {_VERSIONS} are supported")
    num_tensors, num_entries = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string(_MAX_NAME)
        if key in metadata:
            raise CheckpointError(f"{path}: the key {printable(key)} of the metadata is there twice")
        metadata[key] = reader.value(reader.scalar("I"))
    infos = [reader.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment: expected a positive integer, got {shown(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    expected: int | None = 0
    for name, shape, number, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {printable(name)} is there twice")
        # Without filling between them or bytes in common, as llama.cpp demands: a wrong shape or encoding shows here.
        if expected is not None and offset != expected:
            problem = f"expected offset {expected}, where the tensor before it ends, got {offset}"
            raise CheckpointError(f"{path}: tensor {printable(name)}: {problem}")
        tensors[name] = tensor = reader.tensor(name, shape, number, start + offset)
        # Past an encoding of unknown size nothing is expected.
        expected = -(-(offset + tensor.data.size) // alignment) * alignment if tensor.data.size else None
    return GgufHeader(path, metadata, tensors, (path,))


class _Reader:
    """Reads values one after another; every read past the end is an error that names the file."""

    def __init__(self, file: Path, mapped: mmap.mmap) -> None:
        self.at = 0
        self._file = file
        self._mapped = mapped
        self._size = len(mapped)

    def take(self, count: int) -> bytes:
        start = self._skip(count)
        return self._mapped[start : start + count]

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size))[0]

    def string(self, longest: int | None = None) -> str:
        length = self.scalar("Q")
        if longest is not None and length > longest:
            raise CheckpointError(f"{self._file}: a name of {length} bytes: not a sound GGUF file")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._file}: a string is not UTF-8: {error}") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self._file}: metadata of an unknown type {kind}")
        items, count = self.scalar("I"), self.scalar("Q")
        if items == _STRING:
            return Strings(count, self._strings(count))
        if items not in _SCALARS:
            raise CheckpointError(f"{self._file}: an array of an unsupported type {items}")
        dtype = np.dtype(_SCALARS[items]).newbyteorder("<")
        return np.frombuffer(self._mapped, dtype, count, self._skip(count * dtype.itemsize))

    def _strings(self, count: int) -> memoryview:
        """Go past an array's strings, and return where they are: a loop of its own, as there may be a million."""
        mapped, at, last = self._mapped, self.at, self._size - _LENGTH.size
        for _ in range(count):
            if at > last:
                raise self._cut_short(at + _LENGTH.size)
            at += _LENGTH.size + _LENGTH.unpack_from(mapped, at)[0]
        start = self._skip(at - self.at)
        return memoryview(mapped)[start:at]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the slowest dimension first, number of the encoding, offset in the data."""
        name, dims = self.string(_MAX_NAME), self.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            problem = f"expected 1 to {_MAX_DIMS} dimensions, got {dims}"
            raise CheckpointError(f"{self._file}: tensor {printable(name)}: {problem}")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        if 0 in shape:
            raise CheckpointError(f"{self._file}: tensor {printable(name)} has shape {list(shape)}: it is empty")
        return name, shape, self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        if number not in _ENCODINGS:
            return GgufTensor(name, f"number {number}", shape, np.empty(0, np.uint8))
        encoding, elements, block_bytes = _ENCODINGS[number]
        if shape[-1] % elements:
            problem = f"expected rows of whole {encoding} blocks of {elements}, got shape {list(shape)}"
            raise CheckpointError(f"{self._file}: tensor {printable(name)}: {problem}")
        row = shape[-1] // elements * block_bytes
        size = math.prod(shape[:-1]) * row
        if start + size > self._size:
            raise self._cut_short(start + size)
        data = np.frombuffer(self._mapped, np.uint8, size, start)
        return GgufTensor(name, encoding, shape, data.reshape(*shape[:-1], row))

    def _skip(self, count: int) -> int:
        """Go on by `count` bytes, and return where they begin."""
        start = self.at
        if start + count > self._size:
            raise self._cut_short(start + count)
        self.at = start + count
        return start

    def _cut_short(self, expected: int) -> CheckpointError:
        return CheckpointError(f"{self._file}: cut short: at least {expected} bytes expected, {self._size} found")
