"""The results of `paged-kv bench --all` as a section of docs/performance.md, and as pictures.

    paged-kv bench --all --out benchmarks/results/decode_cpu && python -m benchmarks.pages

The folder has a file of each CPU family; a roofline is drawn beside each. The README has the picture of all families.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT
from paged_kv.bench.other_work import footnote, marked_title
from paged_kv.bench.report import share_cell
from paged_kv.bench.results import Results, Row, read_results

RESULTS = "benchmarks/results/decode_cpu"
BARS = "docs/pictures/decode_cpu_bars.png"
MARK = "decode_cpu"
"""The section of a page between `<!-- decode_cpu: begin -->` and `<!-- decode_cpu: end -->` is written here."""
PAGE_CASES = (
    *("bf16", "group8", "prefill", "step-1", "step-8", "step-prefill"),
    *("step-q8_0-1", "step-q8_0-8", "step-q4_k_m-1", "step-q4_k_m-8", "step-q4_k_m-prefill"),
)
"""The cases of the page; the results have all."""
OTHERS = ("vLLM", "torch", "MAX", "Hugging Face transformers", "llama.cpp", "OpenVINO")
"""Systems of the page's columns: the beginnings of their labels."""
LONGEST = 8.0
"""Longer bars are cut here, and say so: the axis begins at 0, so that lengths can be compared."""
OURS, THEIRS = "#c2410c", "#64748b"


def write() -> None:
    """The section and the pictures, from every family's file."""
    paths = sorted((CHECKOUT / RESULTS).glob("*.csv"))
    families = [read_results(path) for path in paths]
    for path, results in zip(paths, families, strict=True):
        draw_roofline(results, path.with_suffix(".png"))
    draw_bars(families, CHECKOUT / BARS)
    section = markdown(families, BARS.removeprefix("docs/"), f"../{RESULTS}/{{family}}.png")
    update_page(CHECKOUT / "docs" / "performance.md", section)


def markdown(families: Sequence[Results], picture: str, rooflines: str) -> str:
    """The page's section: the bars and a table a family. `rooflines` is a link's target, with `{family}` in it."""
    lines = [f"![Time of other systems in units of paged-kv's]({picture})"]
    for results in families:
        rows = {row["case"]: row for row in _measured(results)}
        shown = [rows[name] for name in PAGE_CASES if name in rows]
        others = [name for name in OTHERS if any(_factor(row, name) is not None for row in shown)]
        columns = ["case", "paged-kv", "share of read bandwidth (target)", *others]
        lines += ["", f"{_where(results)} [Roofline]({rooflines.format(family=results['family'])}).{_slower(rows)}", ""]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in shown:
            factors = (_factor(row, name) for name in others)
            cells = [marked_title(row), f"{_three(row['ms'])} ms, {row['rate']}", share_cell(row)]
            cells += ["" if factor is None else f"{factor:.2g}x" for factor in factors]
            lines.append(f"| {' | '.join(cells)} |")
        if note := footnote(shown):
            lines += ["", f"\\{note}"]
    return "\n".join(lines)


def _factor(row: Row, system: str) -> float | None:
    """Time of a system over paged-kv's; of several variants of it the fastest one's."""
    return min((ratio for label, ratio in ratios(row).items() if label.startswith(system)), default=None)


def _slower(rows: Mapping[str, Row]) -> str:
    """The cases in which another system is faster, as a sentence; empty where there is none."""
    cells = [
        f"{row['title']} ({system} {ratio:.2g}x)"
        for row in rows.values()
        for system, ratio in ratios(row).items()
        if ratio < 0.995
    ]
    return f" Slower than another system: {'; '.join(cells)}." if cells else ""


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


def by_case(families: Sequence[Results]) -> dict[str, list[Row | None]]:
    """Each case's row in every family, None where it has no figure, in the order of the first family that has it."""
    measured = [{row["case"]: row for row in _measured(results)} for results in families]
    return {name: [rows.get(name) for rows in measured] for name in dict.fromkeys(n for rows in measured for n in rows)}


def ratios(row: Row) -> dict[str, float]:
    """By comparison, the factor over other systems than ours."""
    return {
        versus["label"]: versus["ratio"]
        for versus in row["versus"]
        if versus["ratio"] is not None and not all(peer["key"].startswith("ours") for peer in versus["peers"])
    }


def _measured(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["ms"] is not None]


def _where(results: Results) -> str:
    """The family, its machine, the dates, the versions of all systems, and the read bandwidth."""
    rows = _measured(results)
    systems = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "numpy")
    dates = ", ".join(sorted({row["date"] for row in rows}))
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    bandwidth = statistics.median([row["read_gb_per_s"] for row in rows])
    return f"**{results['family']}**: {machines}; {dates}; {bandwidth:.0f} GB/s read; {systems}."


def _three(value: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_bars(families: Sequence[Results], path: Path) -> None:
    """Writes a PNG: how many times as long as paged-kv other systems take, case by case, a panel a CPU family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = {name: rows for name, rows in by_case(families).items() if any(row and ratios(row) for row in rows)}
    others = {
        name: dict.fromkeys(label for row in rows if row for label in ratios(row)) for name, rows in cases.items()
    }
    bars = sum(1 + len(labels) for labels in others.values())
    figure, panels = pyplot.subplots(
        1, len(families), figsize=(5 + 4 * len(families), 1 + 0.18 * (bars + len(cases))), dpi=100, squeeze=False
    )
    for at, (results, axes) in enumerate(zip(families, panels[0], strict=True)):
        y, ticks = 0.0, []
        for name, rows in cases.items():
            ticks.append(y)
            row = rows[at]
            for label in (None, *others[name]):
                if row is not None:
                    _bar(axes, y, row, label)
                y += 1
            y += 0.8
        titles = (
            [next(row["title"] for row in rows if row) for rows in cases.values()] if at == 0 else [""] * len(cases)
        )
        axes.set_yticks(ticks, titles, fontsize=8)
        axes.set_ylim(y, -1)
        axes.set_xlim(0, LONGEST + 4.5)
        axes.set_xticks(range(int(LONGEST) + 1))
        dates = sorted(row["date"] for rows in cases.values() if (row := rows[at]))
        axes.set_title(f"{results['family']}, {dates[-1] if dates else ''}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time in units of paged-kv's in the same run; // = longer than the picture", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def _bar(axes: Any, y: float, row: Row, label: str | None) -> None:
    """Ours (None), or the other system of that label where it was measured."""
    found = 1.0 if label is None else ratios(row).get(label)
    if found is None:
        return
    text = f"{row['ms']:.3g} ms  paged-kv" if label is None else f"{found:.2g}x  {label}"
    axes.barh(y, min(found, LONGEST), color=OURS if label is None else THEIRS, height=0.8)
    text = f"// {text}" if found > LONGEST else text
    axes.annotate(text, (min(found, LONGEST), y), (4, 0), textcoords="offset points", va="center", fontsize=7)


def draw_roofline(results: Results, path: Path) -> None:
    """Writes a PNG: arithmetic a second over arithmetic per byte, ours and the others', under the machine's own roof.

    Cases without arithmetic or a figure are left out, and nothing is written where none is left.
    """
    rows = [row for row in results["rows"] if row["flops"] and row["ms"]]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=120)
    bandwidth = statistics.median([row["read_gb_per_s"] for row in rows])
    peaks = {name: flops / 1e9 for name, flops in results["peaks"].items()}
    intensities = [row["flops"] / row["bytes"] for row in rows]
    left, right = min(intensities) / 2, max([*intensities, max(peaks.values(), default=0) / bandwidth]) * 2
    top = max(peaks.values(), default=bandwidth * right)
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color="black", linewidth=1.5)
    axes.annotate(f"read bandwidth {bandwidth:.0f} GB/s", (left * 1.1, left * bandwidth * 1.9), rotation=37, fontsize=9)
    for name, peak in peaks.items():
        axes.plot([peak / bandwidth, right], [peak, peak], color="black", linewidth=1, linestyle="--")
        axes.annotate(f"{name} matrix product of torch", (right, peak * 1.08), ha="right", fontsize=8)

    for row, x in zip(rows, intensities, strict=True):
        for versus in row["versus"]:
            for peer in versus["peers"]:
                if peer["ms"]:
                    axes.plot(x, row["flops"] / peer["ms"] / 1e6, "x", color=THEIRS, markersize=6)
        axes.plot(x, row["flops"] / row["ms"] / 1e6, "o", color=OURS, markersize=6)
    # Cases of one intensity share a label.
    named: dict[float, list[Any]] = {}
    for row, x in zip(rows, intensities, strict=True):
        named.setdefault(float(f"{x:.1e}"), []).append(row)
    for x, group in named.items():
        low = min(row["flops"] / row["ms"] / 1e6 for row in group)
        label = ", ".join(row["case"] for row in group[:2]) + (" ..." if len(group) > 2 else "")
        axes.annotate(label, (x, low), (7, -5), textcoords="offset points", fontsize=7, color=OURS)

    axes.plot([], [], "o", color=OURS, label="paged-kv")
    axes.plot([], [], "x", color=THEIRS, label="other systems")
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("FLOP per byte that must be read")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{results['family']}: {rows[0]['machine']}, {rows[0]['date']}", fontsize=9)
    axes.grid(True, which="both", color="#e5e7eb", linewidth=0.6)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def save(figure: Any, path: Path) -> None:
    """Writes a PNG of 64 colours, a quarter of the bytes: pictures are in the repository."""
    from PIL import Image  # matplotlib's own

    figure.savefig(path)
    with Image.open(path) as drawn:
        small = drawn.convert("RGB").quantize(64)
    small.save(path, optimize=True)


if __name__ == "__main__":
    write()
