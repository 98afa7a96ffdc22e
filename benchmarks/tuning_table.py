"""`mojo_ops/isa/cpu_tuning_table.mojo`: a struct whose fields are written by hand, and a row of values a CPU family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

Values = dict[str, str]
"""By field, the value as Mojo spells it."""

_FIELD = re.compile(r"^    var (\w+): \w+$", re.MULTILINE)
_ROW = re.compile(
    r'^(?P<comment>(?:    #[^\n]*\n)*)(?:    if family == "(?P<family>[\w-]+)":\n    )?    return CpuTuning\('
    r"(?P<values>[^()]*)\)\n",
    re.MULTILINE,
)
_VALUE = re.compile(r"(\w+)\s*=\s*([^,]+?)\s*(?:,|$)")


@dataclass(frozen=True)
class Row:
    """The values of one family, and the comment above them."""

    values: Values
    comment: str = ""
    """Lines without their `#`."""


@dataclass(frozen=True)
class TuningTable:
    """The file, parsed: `head` is everything before the first row, word for word."""

    head: str
    fields: tuple[str, ...]
    rows: Mapping[str, Row]
    """By family, in the order of the file."""
    default: Row
    """The row of CPUs that are not in the table."""

    @classmethod
    def parse(cls, text: str) -> TuningTable:
        """Raises `ValueError` where the text is not what `render` writes, spaces and line breaks aside."""
        found = [*_ROW.finditer(text)]
        if not found:
            raise ValueError("the table has no rows")
        head = text[: found[0].start()]
        begin = head.find("struct CpuTuning")
        fields = tuple(_FIELD.findall(head[begin:])) if begin >= 0 else ()
        rows: dict[str, Row] = {}
        default = None
        end = found[0].start()
        for match in found:
            values = dict(_VALUE.findall(match["values"]))
            name = match["family"] or "the default"
            if match.start() != end or default is not None or name in rows:
                raise ValueError(f"the table holds something else before the row of {name}")
            if tuple(sorted(values)) != tuple(sorted(fields)):
                raise ValueError(f"the row of {name} has fields {sorted(values)}, and the struct {sorted(fields)}")
            comment = "\n".join(line.strip().removeprefix("#").strip() for line in match["comment"].splitlines())
            row = Row({field: values[field] for field in fields}, comment)
            if match["family"]:
                rows[name] = row
            else:
                default = row
            end = match.end()
        if default is None or text[end:].strip():
            raise ValueError("the table does not end with the row of CPUs that are not in it")
        return cls(head, fields, rows, default)

    @classmethod
    def read(cls, path: Path) -> TuningTable:
        return cls.parse(path.read_text())

    def row(self, family: str) -> Row:
        """The values that a family is compiled with."""
        return self.rows.get(family, self.default)

    def with_row(self, family: str, row: Row) -> TuningTable:
        """The table with another row of that family; a new family comes last."""
        return replace(self, rows={**self.rows, family: row})

    def render(self) -> str:
        """The file's text, as `mojo format` leaves it."""
        parts = [self.head]
        for family, row in self.rows.items():
            parts += [_comment(row), f'    if family == "{family}":\n', _call(row, 8)]
        return "".join([*parts, _comment(self.default), _call(self.default, 4)])


def _comment(row: Row) -> str:
    return "".join(f"    # {line}\n" for line in row.comment.splitlines())


def _call(row: Row, indent: int) -> str:
    """A line a field: the formatter keeps them apart because of the last comma."""
    space = " " * indent
    values = "".join(f"{space}    {field}={value},\n" for field, value in row.values.items())
    return f"{space}return CpuTuning(\n{values}{space})\n"
