"""The live view of a running engine on a terminal: requests, pages and tokens a second, drawn in place on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from paged_kv.engine.engine import Engine

_BAR = 40
"""Characters of the bar of pages."""


@contextmanager
def live_view(engine: Engine, enabled: bool) -> Iterator[None]:
    """Draws the engine's state until it leaves, a few times a second."""
    if not enabled:
        yield
        return
    began = time.monotonic()
    with Live(
        get_renderable=lambda: render(engine, time.monotonic() - began),
        console=Console(stderr=True, force_terminal=True),
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    ):
        yield


def render(engine: Engine, seconds: float) -> Table:
    """The state at one moment."""
    count, statistics = engine.pool.count(), engine.statistics
    total = max(sum(count), 1)
    used, cached = round(_BAR * count.used / total), round(_BAR * count.cached / total)
    bar = "█" * used + "▒" * cached + "·" * max(_BAR - used - cached, 0)
    tokens = statistics.prompt_tokens + statistics.decode_tokens
    table = Table.grid(padding=(0, 2))
    table.add_row("requests", f"{engine.num_running} running, {engine.num_waiting} waiting")
    table.add_row("pages", f"{bar} {count.used} used, {count.cached} cached, {count.free} free")
    table.add_row(
        "tokens",
        f"{statistics.prompt_tokens} of prompts, {engine.tokens_found} found, {statistics.decode_tokens} new;"
        f" {tokens / seconds if seconds else 0:.0f} a second",
    )
    table.add_row("preemptions", str(engine.preemptions))
    return table
