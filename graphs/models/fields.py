"""A model's `config.json` as typed fields; errors name file, key and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_kv.arguments import printable
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular

MAX_SIZE = 2**31 - 1
"""The largest integer of a configuration: token ids and positions are int32."""
MAX_NUMBER, MIN_NUMBER = 3.4028234e38, 1.1754944e-38
"""The largest and the smallest number: models compute in float32."""
MAX_LAYERS = 4096
"""Names and windows of layers are listed: thirty times what models have, and listed in milliseconds."""
_MAX_BYTES = 64 << 20
"""The most bytes of a JSON file: real ones have some kilobytes, a list of a few numbers for each layer included."""


@dataclass(frozen=True)
class Fields:
    """A JSON object in a file. `null` is the same as a missing key. `prefix` is where in the file the object lies."""

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, file: Path) -> Fields:
        """The object that is a whole file.

        Raises:
            CheckpointError: there is no such file, or no JSON object in it.
        """
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file")
        try:
            values = json.loads(read_regular(file, _MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: expected a JSON object, got {type(values).__name__}")
        return cls(file, values)

    def with_defaults(self, **values: object) -> Fields:
        """The same object with values for keys that are missing or null."""
        missing = {key: value for key, value in values.items() if self.get(key) is None}
        return Fields(self.file, {**self.values, **missing}, self.prefix)

    def with_missing(self, **values: object) -> Fields:
        """The same object with values for keys that are missing; null is one of its values."""
        return Fields(self.file, {**values, **self.values}, self.prefix)

    def error(self, key: str, problem: str, value: object = None) -> CheckpointError:
        """`value` is the one to show where it is a default, not in the file."""
        value = self.get(key) if value is None else value
        shown = printable(json.dumps(value, default=repr))
        return CheckpointError(f"{self.file}: {self.prefix}{key}: {problem}, got {shown}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "expected an object")
        return Fields(self.file, value, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int | None = None, most: int = MAX_SIZE, least: int = 1) -> int:
        """An integer from `least` up to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise self.error(key, f"expected {expected}", value)
        if value > most:
            raise self.error(key, f"expected at most {most}", value)
        return value

    def layers(self) -> int:
        """`num_hidden_layers`."""
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    def number(
        self, key: str, default: float | None = None, least: float = MIN_NUMBER, most: float = MAX_NUMBER
    ) -> float:
        """A number from `least` to `most`; a positive one, unless `least` is 0."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < math.inf or value == least):
            raise self.error(key, f"expected a {'positive number' if least else 'number from 0 on'}", value)
        if not least <= value <= most:
            raise self.error(key, f"expected a number from {least:g} to {most:g}", value)
        return float(value)

    def numbers(self, key: str, count: int, least: float = MIN_NUMBER, most: float = MAX_NUMBER) -> tuple[float, ...]:
        """A list of `count` positive numbers from `least` to `most`."""
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"expected a list of {count} positive numbers")
        return tuple(Fields(self.file, {key: value}, self.prefix).number(key, None, least, most) for value in values)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def one_of(self, key: str, choices: Mapping[str, Any]) -> Any:
        """Return what `choices` has for the value; for the first of them where it is missing."""
        value = self._value(key, next(iter(choices)))
        if not isinstance(value, str) or value not in choices:
            listed = " or ".join(f'"{choice}"' for choice in choices)
            raise self.error(key, f"expected {listed}")
        return choices[value]

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise self.error(key, f"expected token ids from 0 to vocab_size - 1 = {vocab_size - 1}")
        return tuple(ids)

    def refuse(self, key: str, problem: str) -> None:
        """Refuses a key that says true, or anything else but null and false."""
        if self.get(key) not in (None, False):
            raise self.error(key, problem)

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.file}: {self.prefix}{key} is missing")
        return default
