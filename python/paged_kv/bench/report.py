"""The results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_kv.bench.other_work import footnote, marked_title
from paged_kv.bench.results import Row


def share_cell(row: Row) -> str:
    """`0.87 (0.85)`: the share of the read bandwidth and its target; `0.58 of memcpy` of that of a copy."""
    if row["share"] is None:
        return ""
    cell = f"{row['share']:.2f}{' of memcpy' if row['ceiling'] == 'copy' else ''}"
    if row["share_target"] is None:
        return cell
    return f"{cell} ({row['share_target']:g}{' or a factor' if row['either'] else ''})"


def versus_line(versus: Mapping[str, Any]) -> str:
    """`2.6x vLLM CPU, page 16 (2.5)`, the target in brackets; or why there is no figure; empty where no peer ran."""
    if versus["ratio"] is not None:
        target = "" if versus["at_least"] is None else f" ({versus['at_least']:g})"
        return f"{versus['ratio']:.2g}x {versus['label']}{target}"
    reasons = dict.fromkeys(peer["note"] or "not measured" for peer in versus["peers"])
    return f"{versus['label']}: {'; '.join(reasons)}" if reasons else ""


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(show_lines=True)
    for name in ("case", "ms", "rate", "of read bandwidth", "faster than"):
        table.add_column(name, justify="right" if name in ("ms", "rate") else "left")
    for row in rows:
        ms = row["note"] or f"{row['ms']:.2f}"
        lines = filter(None, map(versus_line, row["versus"]))
        table.add_row(marked_title(row), ms, row["rate"], share_cell(row), "\n".join(lines))
    console.print(table)
    if note := footnote(rows):
        console.print(note, markup=False, highlight=False)
    for row in rows:
        if row.get("profile"):
            console.print(f"{row['title']}:", *row["profile"], sep="\n", markup=False, highlight=False)
