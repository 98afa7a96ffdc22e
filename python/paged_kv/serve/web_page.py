"""The page at `/`: a chat in a browser, and the pages of the pool beside it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.engine.engine import Engine
from paged_kv.page_colours import COLOURS, shades

MOST_CELLS = 2048
"""Cells of the picture at most: adjacent pages share one where there are more."""
MOST_REQUESTS = 64
PAGE = files("paged_kv.serve").joinpath("page.html").read_bytes()


def _digest(tag: str) -> str:
    match = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    assert match is not None
    return f"'sha256-{b64encode(sha256(match[1]).digest()).decode()}'"


HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page's: nothing but its own script and style runs, and it speaks to this server alone."""


def pool_now(engine: Engine) -> dict[str, Any]:
    """The pages of an engine's pool as JSON; `owners` are the requests of each cell, -1 where it is only cached."""
    pool, held = engine.pool, engine.pool.owners()
    counts, cached = pool.count(), pool.look(lambda prefixes: list(prefixes.pages))
    owners = np.zeros(pool.num_pages, np.int64)
    for pages in held.values():
        owners[list(pages)] += 1
    shared = {key: int((owners[list(pages)] > 1).sum()) for key, pages in held.items()}
    owners[[page for page in cached if not owners[page]]] = -1
    requests = [
        {"name": _name(key), "pages": len(pages), "shared": shared[key]}
        for key, pages in list(held.items())[:MOST_REQUESTS]
    ]
    return {
        "pages": pool.num_pages,
        "page_size": pool.page_size,
        "free": counts.free,
        "cached": counts.cached,
        "used": counts.used,
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "owners": _cells(owners),
        "requests": requests,
        "colours": COLOURS,
        "shades": shades(max(int(owners.max(initial=0)), 1)),
    }


def together(pools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The pools of some replicas by their names, at least one: as one, and the counts of each under `replicas`."""
    if len(pools) == 1:
        return next(iter(pools.values()))
    names = sorted(pools)
    each = [pools[name] for name in names]
    rows = max(MOST_REQUESTS // len(each), 1)
    return each[0] | {
        **{count: sum(pool[count] for pool in each) for count in _COUNTS},
        "owners": _cells(np.concatenate([pool["owners"] for pool in each])),
        "requests": [
            request | {"name": f"{name}/{request['name']}"}
            for name, pool in zip(names, each, strict=True)
            for request in pool["requests"][:rows]
        ],
        "shades": max((pool["shades"] for pool in each), key=len),
        "replicas": [{"name": name} | {count: pools[name][count] for count in _COUNTS} for name in names],
    }


_COUNTS = ("pages", "free", "cached", "used", "running", "waiting")


def _cells(owners: npt.NDArray[np.int64]) -> list[int]:
    """The owners of pages, -1 of cached ones, in `MOST_CELLS` cells at most: of adjacent pages the most."""
    values = np.where(owners < 0, 1, np.where(owners > 0, owners + 1, 0))
    cells = min(owners.size, MOST_CELLS)
    most = np.maximum.reduceat(values, -(-np.arange(cells) * owners.size // cells))
    return list(map(int, np.where(most == 1, -1, np.maximum(most - 1, 0))))


def _name(key: Any) -> str:
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
