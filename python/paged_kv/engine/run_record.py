"""The record of a run: the logits of each position that gave some, and of every operation's row a digest.

Two records of the same prompts say where two runs part: at which position, in which layer and operation
(`differences`). A row is one token of one sample, whatever else was in its step, so a record does not say how a prompt
was cut or who shared a batch.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from paged_kv.arguments import printable
from paged_kv.errors import ContractError
from paged_kv.files import open_regular
from paged_kv.runtime.graph_reading import Operation, Value
from paged_kv.runtime.step_profile import layers_of, operation_name

_FORMAT = "paged-kv run record 1"
_OPERATIONS, _FORMAT_KEY = "operations", "format"
_FIELDS = ("tokens", "digests", "places", "logits")


@dataclass
class SampleRecord:
    """The positions of one sample, in the order in which they were computed; a later one replaces an earlier."""

    tokens: dict[int, int] = field(default_factory=dict)
    """The token at each position that was computed: of a prefix that was in the cache there are none."""
    digests: dict[int, np.ndarray] = field(default_factory=dict)
    """`[operations]` uint64 of a position; 0 of an operation that has no row for it."""
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    """`[vocab]` float32 after a position, where they were asked for."""


class RunRecord:
    """The rows of an engine's steps, by sample (`Engine.record`)."""

    def __init__(self, operations: Sequence[Operation], inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Begin one for the program with these operations, inputs and outputs.

        The first input has the tokens and the last one the rows that want logits, so their sizes say what a row is of.
        """
        self.names = [
            f"{layer}: {operation_name(op)}" for layer, op in zip(layers_of(operations), operations, strict=True)
        ]
        self.samples: dict[tuple[int, int], SampleRecord] = {}
        self._symbols = inputs[0].shape[0].symbol, inputs[-1].shape[0].symbol
        self._read = {id(value.memory) for value in chain(outputs, *(op.operands for op in operations))}
        self._rows: list[list[tuple[SampleRecord, int]]] = [[], []]

    def begin(self, step: Sequence[tuple[tuple[int, int], int, Sequence[int]]], counts: Sequence[int]) -> None:
        """Says what the rows of the next step are: for each sample its key, the tokens it has in the cache and those
        that it brings, and after how many of the last of these it wants logits.
        """
        self._rows = [[], []]
        for (key, cached, new), count in zip(step, counts, strict=True):
            sample = self.samples.setdefault(key, SampleRecord())
            rows = [(sample, cached + offset) for offset in range(len(new))]
            for (_, position), token in zip(rows, new, strict=True):
                sample.tokens[position] = token
                sample.digests[position] = np.zeros(len(self.names), np.uint64)
                sample.logits.pop(position, None)
            self._rows[0] += rows
            self._rows[1] += rows[-count:]

    def see(self, index: int, op: Operation, results: Sequence[np.ndarray]) -> None:
        """Takes the results of operation `index`, those that have rows and are read: no step reads the lse. Integers
        say where a row lies in its step, which is not compared.
        """
        for number, (value, result) in enumerate(zip(op.results, results, strict=True)):
            rows_of = value.shape[0].symbol if value.shape and value.shape[0].coefficient else None
            is_integer = result.dtype.kind in "iu"
            if rows_of not in self._symbols or id(value.memory) not in self._read or is_integer:
                continue
            rows = self._rows[self._symbols.index(rows_of)]
            digests = _digests(result, len(rows)) * np.uint64(2 * number + 1)
            for row, (sample, position) in enumerate(rows):
                sample.digests[position][index : index + 1] += digests[row : row + 1]

    def end(self, logits: np.ndarray) -> None:
        """Takes the logits of the step, `[rows that want some, vocab]`."""
        for (sample, position), row in zip(self._rows[1], logits, strict=True):
            sample.logits[position] = row.copy()

    def write(self, file: IO[bytes]) -> None:
        """Writes the record as NumPy's `.npz`."""
        arrays: dict[str, Any] = {_FORMAT_KEY: np.array(_FORMAT), _OPERATIONS: np.array(self.names)}
        for (request, index), sample in sorted(self.samples.items()):
            positions = np.array(sorted(sample.tokens), np.int64)
            places = np.array(sorted(sample.logits), np.int64)
            fields = (
                np.stack([positions, [sample.tokens[at] for at in positions.tolist()]]),
                np.stack([sample.digests[at] for at in positions.tolist()]),
                places,
                np.stack([sample.logits[at] for at in places.tolist()])
                if places.size
                else np.zeros((0, 0), np.float32),
            )
            arrays |= {f"{request}.{index}.{name}": array for name, array in zip(_FIELDS, fields, strict=True)}
        np.savez(file, **arrays)


@dataclass(frozen=True)
class Recorded:
    """A record, read from its file."""

    names: tuple[str, ...]
    """The operations, each with its layer."""
    samples: Mapping[tuple[int, int], SampleRecord]


def read_record(path: Path) -> Recorded:
    """The record in a file of `RunRecord.write`.

    Raises:
        ContractError: there is none, or it is damaged.
    """
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            if str(arrays[_FORMAT_KEY]) != _FORMAT:
                raise ValueError(f"its format is {printable(arrays[_FORMAT_KEY])}")
            names = tuple(map(str, arrays[_OPERATIONS]))
            keys = sorted({tuple(map(int, name.split(".")[:2])) for name in arrays.files if name.count(".") == 2})
            samples = {}
            for request, index in keys:
                (positions, tokens), digests, places, logits = (arrays[f"{request}.{index}.{name}"] for name in _FIELDS)
                if digests.shape != (len(positions), len(names)) or len(places) != len(logits):
                    raise ValueError(f"sample {request}.{index} has arrays of other sizes")
                samples[request, index] = SampleRecord(
                    dict(zip(positions.tolist(), tokens.tolist(), strict=True)),
                    dict(zip(positions.tolist(), digests, strict=True)),
                    dict(zip(places.tolist(), logits, strict=True)),
                )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ContractError(f"{printable(path)}: no record of a run: {printable(error)}") from None
    return Recorded(names, samples)


@dataclass(frozen=True)
class Difference:
    """The differences of one sample of two runs."""

    key: tuple[int, int]
    """Its request and its number among the request's samples."""
    compared: int
    """Positions that both runs computed, with the same tokens up to there."""
    position: int | None = None
    """The first one with a row that differs; None where all are alike."""
    operation: str = ""
    """The first operation, with its layer, whose row differs there."""
    differing: int = 0
    """Positions with a row that differs."""
    largest: float = 0.0
    """The largest difference of two logits."""
    parted: int | None = None
    """The first position with another token; None where one text begins with the other."""


def differences(one: Recorded, other: Recorded) -> Iterator[Difference]:
    """Compare each sample that both runs have.

    Raises:
        ContractError: their models have steps of other operations or other vocabularies, or no sample is in both.
    """
    if one.names != other.names:
        raise ContractError("the two records are of models whose steps have other operations")
    keys = sorted(one.samples.keys() & other.samples.keys())
    if not keys:
        raise ContractError("the two records have no sample in common")
    for key in keys:
        yield _difference(key, one.names, one.samples[key], other.samples[key])


def _difference(key: tuple[int, int], names: Sequence[str], one: SampleRecord, other: SampleRecord) -> Difference:
    parted = min(
        (at for at in one.tokens.keys() & other.tokens.keys() if one.tokens[at] != other.tokens[at]), default=None
    )
    compared = [at for at in sorted(one.digests.keys() & other.digests.keys()) if parted is None or at < parted]
    position, operation, differing, largest = None, "", 0, 0.0
    for at in compared:
        rows = one.digests[at], other.digests[at]
        # An operation of the last rows alone has none where a run asked for no logits.
        parts = (rows[0] != rows[1]) & (rows[0] != 0) & (rows[1] != 0)
        if parts.any():
            differing += 1
            if position is None:
                position, operation = at, names[int(parts.argmax())]
        if at in one.logits and at in other.logits:
            if one.logits[at].shape != other.logits[at].shape:
                raise ContractError("the two records are of models with other vocabularies")
            largest = max(largest, float(np.abs(one.logits[at] - other.logits[at]).max(initial=0)))
    return Difference(key, len(compared), position, operation, differing, largest, parted)


def _digests(result: np.ndarray, rows: int) -> np.ndarray:
    """A digest of the bits of each row, `[rows]` uint64, none of them 0: a sum of its elements by odd numbers."""
    bits = np.ascontiguousarray(result).reshape(rows, -1)
    bits = bits.view(f"u{bits.dtype.itemsize}")
    numbers = np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    sums = (bits.astype(np.uint64) * numbers).sum(axis=1, dtype=np.uint64)
    return sums + (sums == 0)
