"""The results as sections of docs/performance.md and README.md: the CPU families side by side, then each by itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_kv.benchmarks.report import share_cell, versus_lines
from paged_kv.benchmarks.results import Row

MARK = "decode_cpu"
"""What stands in a page between `<!-- decode_cpu: begin -->` and `<!-- decode_cpu: end -->` is written by
`--update-readme`."""
Results = Mapping[str, Any]
"""Of one CPU family, as its file has them."""


def markdown(families: Sequence[Results], pictures: str) -> str:
    """The section of docs/performance.md. `pictures` is where the rooflines are, `{family}` standing for the family."""
    lines = ["Time, rate, share of the read bandwidth; in brackets the target on that family of CPUs.", ""]
    lines += _head("case (head_dim 128)", families)
    for rows in by_case(families).values():
        title = next(row["title"] for row in rows if row)
        lines.append(f"| {title} | {' | '.join(_figures(row) for row in rows)} |")
    for results in families:
        lines += ["", *_family(results), "", f"![Roofline]({pictures.format(family=results['family'])})"]
    return "\n".join(lines)


def summary(families: Sequence[Results], picture: str) -> str:
    """The README's section: the bars, and a line for each system that a case was measured against."""
    lines = [f"![Time of other systems in units of paged-kv's]({picture})", ""]
    lines += [f"- {_where(results)}" for results in families]
    lines += ["", "The other system's time over paged-kv's:", "", *_head("case | other system", families)]
    for rows in by_case(families).values():
        found = [{} if row is None else ratios(row) for row in rows]
        labels = dict.fromkeys(label for one in found for label in one)
        title = next(row["title"] for row in rows if row)
        for label in labels:
            cells = [f"{one[label]:.2g}x" if label in one else "" for one in found]
            lines.append(f"| {title} | {label} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def update_page(page: Path, section: str, mark: str = MARK) -> None:
    """Replaces what stands between the two lines of a page that `mark` names.

    Raises:
        ValueError: the markers are not there.
    """
    text = page.read_text()
    first, last = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    begin, end = text.find(first), text.find(last)
    if not 0 <= begin < end:
        raise ValueError(f"{page}: no lines {first} and {last}")
    page.write_text(f"{text[: begin + len(first)]}\n{section}\n{text[end:]}")


def _head(first: str, families: Sequence[Results]) -> list[str]:
    columns = [*first.split(" | "), *(results["family"] for results in families)]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def by_case(families: Sequence[Results]) -> dict[str, list[Row | None]]:
    """Each case's row in every family, None where it has no figure, in the order of the first family that has it."""
    measured = [{row["case"]: row for row in _measured(results)} for results in families]
    return {name: [rows.get(name) for rows in measured] for name in dict.fromkeys(n for rows in measured for n in rows)}


def _figures(row: Row | None) -> str:
    if row is None:
        return ""
    share = share_cell(row)
    return f"{_three(row['ms'])} ms, {row['rate']}{f', {share}' if share else ''}"


def ratios(row: Row) -> dict[str, float]:
    """By comparison, the factor over other systems than ours."""
    return {
        versus["label"]: versus["ratio"]
        for versus in row["versus"]
        if versus["ratio"] is not None and not all(peer["key"].startswith("ours") for peer in versus["peers"])
    }


def _family(results: Results) -> list[str]:
    """One family: what was measured where, and every comparison with its target."""
    rows = _measured(results)
    commits = dict.fromkeys(row["commit"] for row in rows)
    lines = [
        f"### {results['family']}",
        "",
        f"{_where(results)} "
        f"Read bandwidth: {statistics.median([row['read_gb_per_s'] for row in rows]):.0f} GB/s "
        f"(median over the cases; each share is of its own run's). Commit {', '.join(commits)}.",
        "",
        "| case | faster than |",
        "|---|---|",
    ]
    return lines + [f"| {row['title']} | {', '.join(versus_lines(row))} |" for row in rows if row["versus"]]


def _measured(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["ms"] is not None]


def _where(results: Results) -> str:
    """The family, its machine, the dates and the versions of all systems."""
    rows = _measured(results)
    systems = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "numpy")
    dates = ", ".join(sorted({row["date"] for row in rows}))
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    return f"{results['family']}: {machines}; {dates}; {systems}."


def _three(value: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
