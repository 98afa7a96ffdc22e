"""The results of `paged-kv bench --all` as a section of docs/performance.md, and as pictures.

    paged-kv bench --all --out benchmarks/results/decode_cpu && python -m benchmarks.pages

The folder has a file of each CPU family; a roofline and bars of all its cases are drawn beside each. The README has six
bars of one family.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT
from paged_kv.bench.other_work import footnote, is_marked, marked_title
from paged_kv.bench.report import share_cell
from paged_kv.bench.results import Results, Row, read_results

RESULTS = "benchmarks/results/decode_cpu"
BARS = "docs/pictures/decode_cpu_bars.png"
BARS_END = "_bars"
"""After a family's name, in the file of the bars of its cases."""
MARK = "decode_cpu"
"""The section of a page between `<!-- decode_cpu: begin -->` and `<!-- decode_cpu: end -->` is written here."""
PAGE_CASES = (
    *("bf16", "group8", "prefill", "step-1", "step-8", "step-prefill"),
    *("step-q8_0-1", "step-q8_0-8", "step-q4_k_m-1", "step-q4_k_m-8", "step-q4_k_m-prefill"),
)
"""The cases of the page; the results have all."""
OTHERS = ("vLLM", "torch", "MAX", "Hugging Face transformers", "llama.cpp", "OpenVINO")
"""Systems of the page's columns: the beginnings of their labels."""
SIX = {
    "bf16": "decode attention, 8 requests",
    "step-1": "decode step, 1 request",
    "step-8": "decode step, 8 requests",
    "step-q4_k_m-8": "the same with Q4_K_M weights",
    "step-prefill": "prompt of 256 tokens",
    "e4m3": "attention over a float8 cache",
}
"""The cases of the README's picture, by the name of their bar."""
LONGEST = 8.0
"""Longer bars are cut here, and say so: the axis begins at 0, so that lengths can be compared."""
OURS, THEIRS = "#c2410c", "#64748b"


def write() -> None:
    """The section and the pictures, from every family's file."""
    paths = sorted((CHECKOUT / RESULTS).glob("*.csv"))
    families = [read_results(path) for path in paths]
    for path, results in zip(paths, families, strict=True):
        draw_roofline(results, path.with_suffix(".png"))
        draw_bars(results, path.with_name(f"{path.stem}{BARS_END}.png"))
    draw_six(families, CHECKOUT / BARS)
    links = " ".join(
        f"[{name}](../{RESULTS}/{{family}}{end}.png)." for name, end in (("All cases", BARS_END), ("Roofline", ""))
    )
    update_page(CHECKOUT / "docs" / "performance.md", markdown(families, links))


def markdown(families: Sequence[Results], links: str) -> str:
    """The page's section: a table a family. `links` lead to its pictures, with `{family}` in them."""
    lines: list[str] = []
    for results in families:
        rows = {row["case"]: row for row in _measured(results)}
        shown = [rows[name] for name in PAGE_CASES if name in rows]
        others = [name for name in OTHERS if any(_factor(row, name) is not None for row in shown)]
        columns = ["case", "paged-kv", "share of read bandwidth (target)", *others]
        lines += ["", f"{_where(results)} {links.format(family=results['family'])}{_slower(rows)}", ""]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in shown:
            factors = (_factor(row, name) for name in others)
            cells = [marked_title(row), f"{_three(row['ms'])} ms, {row['rate']}", share_cell(row)]
            cells += ["" if factor is None else f"{factor:.2g}x" for factor in factors]
            lines.append(f"| {' | '.join(cells)} |")
        if note := footnote(shown):
            lines += ["", f"\\{note}"]
    return "\n".join(lines[1:])


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


def six_rows(results: Results) -> dict[str, Row]:
    """The family's rows of `SIX` that have a figure to draw and no mark of other work."""
    rows = {row["case"]: row for row in _measured(results) if not is_marked(row)}
    return {name: rows[name] for name in SIX if name in rows and six_bar(rows[name]) is not None}


def six_bar(row: Row) -> tuple[float, str] | None:
    """The speed of paged-kv over another one and what that is: a read loop for decode attention, our own bfloat16 cache
    for a float8 one, else the fastest other system. None if that was not measured.
    """
    if row["case"] == "bf16":
        return row["share"], "reading memory"
    if row["case"] == "e4m3":
        own = [(versus["ratio"], "a bfloat16 cache") for versus in row["versus"] if versus["ratio"]]
        return min(own, default=None)
    return min(((ratio, label) for label, ratio in ratios(row).items()), default=None)


def with_most_bars(families: Sequence[Results]) -> Results:
    """The family with the most bars; of several the one measured last."""

    def order(results: Results) -> tuple[int, str]:
        rows = six_rows(results).values()
        return len(rows), max((row["date"] for row in rows), default="")

    return max(families, key=order)


def draw_six(families: Sequence[Results], path: Path) -> None:
    """Writes a PNG, readable at 800 pixels: `SIX` of the family with the most of them; nothing where none has any."""
    results = with_most_bars(families)
    if not (rows := six_rows(results)):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.45 + 0.42 * len(rows)), dpi=200)
    longest = 1.0
    for y, row in enumerate(rows.values()):
        speed, other = six_bar(row) or (0.0, "")
        longest = max(longest, speed)
        axes.barh(y, speed, color=OURS, height=0.62)
        axes.annotate(
            f"{speed:.2f}x {other}", (max(speed, 1), y), (6, 0), textcoords="offset points", va="center", fontsize=10.5
        )
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [SIX[name] for name in rows], fontsize=10.5)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 1.8 * longest), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("Speed of paged-kv over the fastest other system's", fontsize=11.5, loc="left")
    machine = next(iter(rows.values()))["machine"].partition(" (")[0]
    dates = ", ".join(sorted({row["date"] for row in rows.values()}))
    scale = "Longer is faster; the line is 1x. Models: 1.1 G parameters, bfloat16."
    caption = f"{scale}\n{machine} ({results['family']}), {dates}"
    axes.set_xlabel(caption, fontsize=10, loc="left")
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def draw_bars(results: Results, path: Path) -> None:
    """Writes a PNG: how many times as long as paged-kv other systems take in the cases of a CPU family.

    Nothing is written where no other system was measured.
    """
    rows = [row for row in _measured(results) if ratios(row)]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = sum(1 + len(ratios(row)) for row in rows)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.18 * (bars + len(rows))), dpi=100)
    y, ticks = 0.0, []
    for row in rows:
        ticks.append(y)
        for label in (None, *ratios(row)):
            _bar(axes, y, row, label)
            y += 1
        y += 0.8
    axes.set_yticks(ticks, [marked_title(row) for row in rows], fontsize=8)
    axes.set(ylim=(y, -1), xlim=(0, LONGEST + 4.5), xticks=range(int(LONGEST) + 1))
    axes.set_title(f"{results['family']}, {max(row['date'] for row in rows)}", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time in units of paged-kv's in the same run; // = longer than the picture", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def _bar(axes: Any, y: float, row: Row, label: str | None) -> None:
    """Ours (None), or the other system of that label."""
    found = 1.0 if label is None else ratios(row)[label]
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
