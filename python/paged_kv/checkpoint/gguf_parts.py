"""GGUF models in several files: `NAME-00001-of-00003.gguf` and so on, each with some of the tensors.

The first file has the metadata, as llama.cpp's tools write it; every file says which part it is (`split.no`, from 0),
of how many (`split.count`), and how many tensors all of them have together (`split.tensors.count`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.config import checkpoint_path
from paged_kv.checkpoint.gguf_header import GgufHeader, GgufTensor, Strings, read_header
from paged_kv.errors import CheckpointError

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def first_parts(files: Iterable[Path]) -> list[Path]:
    """`files` with one file for all parts of a model: its first, or the first of those that are there."""
    models: dict[object, Path] = {}
    for file in sorted(files):
        name = _NAME.fullmatch(file.name)
        models.setdefault((name["stem"], name["count"]) if name else file, file)
    return list(models.values())


def read_parts(file: Path | str) -> GgufHeader:
    """The header of a model in one file, or of one in several, of which `file` is any.

    Raises:
        CheckpointError: as `read_header`; a part is missing, stands under the name of another, or is of another model;
            a tensor is in two parts; there are not as many tensors as the parts say.
    """
    path = checkpoint_path(file)
    header = read_header(path)
    count = _integer(header, _COUNT, default=1)
    if count == 1:
        _check_part(header, 0, 1)
        if _TENSORS in header.metadata:
            _check_tensors(header, header.tensors)
        return header
    name = _NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count or not 1 <= int(name["number"]) <= count:
        expected = f"NAME-00001-of-{count:05}.gguf" if count < 100_000 else "at most 99999 parts"
        raise CheckpointError(f"{path}: name: expected {expected} for a part of {_COUNT} = {count}")
    headers = []
    for number in range(count):
        part = path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf")
        # A file that cannot be opened ends this: a count that lies costs no more than the parts that are there.
        headers.append(header if part == path else read_header(part))
        _check_part(headers[-1], number, count)
        _check_same_model(headers[0], headers[-1])
    tensors: dict[str, GgufTensor] = {}
    for part_header in headers:
        twice = tensors.keys() & part_header.tensors.keys()
        if twice:
            raise CheckpointError(
                f"{part_header.file}: tensor {printable(min(twice))} is there, and in an earlier part of the model"
            )
        tensors |= part_header.tensors
    for part_header in headers:
        _check_tensors(part_header, tensors)
    return replace(headers[0], tensors=tensors, parts=tuple(part_header.file for part_header in headers))


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    """The file is the part that its place says."""
    for key, expected, default in ((_COUNT, count, 1), (_NUMBER, number, 0 if count == 1 else None)):
        stored = _integer(header, key, default)
        if stored != expected:
            raise CheckpointError(f"{header.file}: {key}: expected {expected}, got {stored}")


def _check_same_model(first: GgufHeader, other: GgufHeader) -> None:
    """Check that a later part says the same as the first one, but for its place."""
    for key, value in other.metadata.items():
        if key in (_NUMBER, "general.alignment"):
            continue
        if key not in first.metadata or not _same(first.metadata[key], value):
            raise CheckpointError(
                f"{other.file}: {printable(key)}: expected that of {first.file.name}, got {shown(value)}:"
                " a part of another model"
            )


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, Strings) and isinstance(other, Strings):
        return one.data == other.data
    return type(one) is type(other) and one == other


def _check_tensors(header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
    total = _integer(header, _TENSORS)
    if total != len(tensors):
        raise CheckpointError(f"{header.file}: {_TENSORS}: expected {len(tensors)}, got {total}")


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < (1 if key == _COUNT else 0):
        raise CheckpointError(f"{header.file}: {key}: expected a number of parts or tensors, got {shown(value)}")
    return value
