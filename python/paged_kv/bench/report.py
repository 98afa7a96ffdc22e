"""The results as a table on the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_kv.bench.results import Row, met

COLUMNS = (
    *("case", "system", "ms", "gb_per_s", "read_gb_per_s", "share", "share_target", "ours_is_faster_by", "at_least"),
    *("relative_error", "note", "machine", "date", "commit"),
)


def share_cell(row: Row) -> str:
    """`0.87 (0.85)`: the share of the read or copy bandwidth, and what it should be."""
    if row["share"] is None:
        return ""
    cell = f"{row['share']:.2f}"
    if row["ceiling"] == "copy":
        cell += " of memcpy"
    if row["share_target"] is None:
        return cell
    return f"{cell} ({row['share_target']:g}{' or a factor' if row.get('either') else ''})"


def versus_lines(row: Row, *, targets: bool = True) -> list[str]:
    """`2.6x vLLM CPU, page 16 (2.5)`, or why there is no figure; the target in brackets, where `targets` are wanted."""
    lines = []
    for versus in row["versus"]:
        wanted = f" ({versus['at_least']:g})" if targets and versus["at_least"] is not None else ""
        if versus["ratio"] is not None:
            lines.append(f"{versus['ratio']:.2g}x {versus['label']}{wanted}")
        elif versus["peers"]:
            reasons = dict.fromkeys(peer["note"] or "not measured" for peer in versus["peers"])
            lines.append(f"{versus['label']}: {'; '.join(reasons)}")
    return lines


def verdict(row: Row) -> str:
    """Return whether the row reaches what it should."""
    if row["note"]:
        return "no figure"
    if not row["right"]:
        return "WRONG"
    return {None: "", True: "yes", False: "no"}[met(row)]


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="In brackets: the target", title_justify="left", show_lines=True)
    for name in ("case", "ms", "rate", "of read bandwidth", "faster than", "reached"):
        table.add_column(name, justify="right" if name in ("ms", "rate") else "left")
    for row in rows:
        ms = row["note"] or f"{row['ms']:.2f}"
        table.add_row(row["title"], ms, row["rate"], share_cell(row), "\n".join(versus_lines(row)), verdict(row))
    console.print(table)


def csv_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line a case and system."""
    lines = []
    for row in rows:
        common = {name: row[name] for name in ("case", "read_gb_per_s", "machine", "date", "commit")}
        ours = {name: row[name] for name in ("ms", "gb_per_s", "share", "share_target", "note")}
        lines.append(common | ours | {"system": "paged-kv", "relative_error": row["error"]})
        for versus in row["versus"]:
            for peer in versus["peers"]:
                figures = {name: peer[name] for name in ("ms", "gb_per_s", "note")}
                factor = {"ours_is_faster_by": peer["ratio"], "at_least": versus["at_least"]}
                lines.append(common | figures | factor | {"system": peer["name"], "relative_error": peer["error"]})
    return lines


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for line in csv_rows(rows):
            writer.writerow(
                {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in line.items()}
            )


def write_json(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(_rounded(results), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Six digits are more than any of these figures has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
