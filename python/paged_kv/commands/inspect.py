"""`paged-kv inspect`: what a trace of pages tells, as a picture and as a page for a browser."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paged_kv.arguments import printable
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.page_colours import COLOURS, shades

if TYPE_CHECKING:
    from paged_kv.commands.page_history import PageHistory


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), help="Write a picture. Needs matplotlib.")
@click.option("--html", type=click.Path(path_type=Path), help="Write one page that a browser shows.")
def inspect(trace: Path, png: Path | None, html: Path | None) -> None:
    """Show which pages were free, cached and used over time, and which requests shared, from `generate --trace`."""
    from paged_kv.commands.page_history import read_history

    history = read_history(trace)
    click.echo(summary(history))
    for path, write in ((png, write_png), (html, write_html)):
        if path is not None:
            try:
                write(history, path)
            except OSError as error:
                raise ContractError(f"{printable(path)}: cannot be written: {error}") from None


def summary(history: PageHistory) -> str:
    """A few lines for a terminal."""
    peak = int(history.used.max(initial=0))
    shared = int(history.owners.max(initial=0))
    seconds = history.seconds[-1] if len(history.seconds) else 0.0
    return (
        f"{history.pages} pages of {history.page_size} tokens, {history.requests} samples in {seconds:.2f} s\n"
        f"used at most: {peak} pages; owners of a page at most: {shared}\n"
        f"found: {history.hits} pages of prompts; copied: {history.copied}; evicted: {history.evicted}"
    )


def write_png(history: PageHistory, path: Path) -> None:
    """Occupancy above, the map of owners below.

    Raises:
        ToolchainError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ToolchainError("--png needs matplotlib: pip install 'paged-kv[bench]'") from None
    figure = Figure(figsize=(10, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    parts = [history.used, history.cached, history.free]
    above.stackplot(history.seconds, *parts, labels=list(COLOURS), colors=list(COLOURS.values()), step="post")
    above.set_ylabel("pages")
    above.legend(loc="upper right", ncols=3)
    most = max(int(history.owners.max(initial=0)), 2)
    colours = [COLOURS["cached"], COLOURS["free"], *shades(most)]
    norm = BoundaryNorm([level - 1.5 for level in range(len(colours) + 1)], len(colours))
    end = history.seconds[-1] if len(history.seconds) else 1.0
    image = below.imshow(
        history.owners,
        aspect="auto",
        interpolation="nearest",
        extent=(0, end, history.pages, 0),
        cmap=ListedColormap(colours),
        norm=norm,
    )
    bar = figure.colorbar(image, ax=below, ticks=range(-1, most + 1))
    bar.ax.set_yticklabels(["cached", "free", *map(str, range(1, most + 1))])
    bar.set_label("owners")
    below.set_ylabel("page")
    below.set_xlabel("seconds")
    figure.savefig(path, format="png")


def write_html(history: PageHistory, path: Path) -> None:
    """One page without anything else to load: the data, and the script that draws it."""
    data = {
        "pages": history.pages,
        "summary": summary(history).splitlines(),
        "seconds": history.seconds.tolist(),
        "used": history.used.tolist(),
        "cached": history.cached.tolist(),
        "owners": history.owners.tolist(),
        "colours": COLOURS,
        "shades": shades(max(int(history.owners.max(initial=0)), 1)),
    }
    template = files("paged_kv.commands").joinpath("inspect.html").read_text()
    path.write_text(template.replace("/*DATA*/null", json.dumps(data, separators=(",", ":")).replace("</", "<\\/")))
