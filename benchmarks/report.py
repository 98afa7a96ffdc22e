"""The results as a table on the terminal, as CSV and JSON, and as sections of docs/performance.md and README.md."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_kv.benchmarks.results import Row, met

BEGIN, END = "<!-- decode_cpu: begin -->", "<!-- decode_cpu: end -->"
"""What stands between them in a page is written by `--update-readme`."""
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
    return cell if row["share_target"] is None else f"{cell} ({row['share_target']:g})"


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
    """Whether the row reaches what it should."""
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


def markdown(results: dict[str, Any], picture: str) -> str:
    """The section of docs/performance.md: what was measured where, every case with its target, the roofline."""
    rows = _measured(results)
    commits = dict.fromkeys(row["commit"] for row in rows)
    lines = [
        f"{_where(results)} "
        f"Read bandwidth: {statistics.median([row['read_gb_per_s'] for row in rows]):.0f} GB/s "
        f"(median over the cases; each share is of its own run's). Commit {', '.join(commits)}. "
        "In brackets: the target.",
        "",
        "| case (head_dim 128) | time | rate | of read bandwidth | faster than |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        versus = ", ".join(versus_lines(row))
        lines.append(f"| {row['title']} | {_three(row['ms'])} ms | {row['rate']} | {share_cell(row)} | {versus} |")
    return "\n".join([*lines, "", f"![Roofline of the cases]({picture})"])


def summary(results: dict[str, Any], picture: str) -> str:
    """The README's section: the bars, and the cases that were measured against another system."""
    lines = [
        f"![Time of other systems in units of paged-kv's]({picture})",
        "",
        _where(results),
        "",
        "| case | time | rate | faster than |",
        "|---|---|---|---|",
    ]
    for row in _measured(results):
        if any(versus["ratio"] is not None for versus in row["versus"]):
            versus = ", ".join(versus_lines(row, targets=False))
            lines.append(f"| {row['title']} | {_three(row['ms'])} ms | {row['rate']} | {versus} |")
    return "\n".join(lines)


def update_page(page: Path, section: str) -> None:
    """Replaces what stands between the two markers of a page.

    Raises:
        ValueError: the markers are not there.
    """
    text = page.read_text()
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{page}: no lines {BEGIN} and {END}")
    page.write_text(f"{text[: begin + len(BEGIN)]}\n{section}\n{text[end:]}")


def _measured(results: dict[str, Any]) -> list[Row]:
    return [row for row in results["rows"] if row["ms"] is not None]


def _where(results: dict[str, Any]) -> str:
    """The machine, the dates and the versions of all systems."""
    rows = _measured(results)
    systems = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "numpy")
    dates = ", ".join(sorted({row["date"] for row in rows}))
    return f"{rows[0]['machine']}; {dates}; {systems}."


def _three(value: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    """Six digits are more than any of these figures has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
