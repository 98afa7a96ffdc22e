"""The page at `/`: a chat in a browser, and the pages of the pool beside it."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np

from paged_kv.engine.engine import Engine
from paged_kv.page_colours import COLOURS, shades

MOST_CELLS = 2048
"""Of the picture: adjacent pages share one where there are more."""
MOST_REQUESTS = 64
PAGE = files("paged_kv.serve").joinpath("page.html").read_bytes()


def _digest(tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    assert found is not None
    return f"'sha256-{b64encode(sha256(found[1]).digest()).decode()}'"


HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page's: nothing but its own script and style runs, and it speaks to this server alone."""


def pool_now(engine: Engine) -> dict[str, Any]:
    """The pages of an engine's pool as JSON has them: `owners` of each cell, -1 where its tokens are known."""
    pool, held = engine.pool, engine.pool.owners()
    counts, known = pool.count(), pool.look(list)
    owners = np.zeros(pool.num_pages, np.int64)
    for pages in held.values():
        owners[list(pages)] += 1
    values = np.where(owners, owners + 1, 0)
    values[[page for page in known if not owners[page]]] = 1
    cells = min(pool.num_pages, MOST_CELLS)
    starts = -(-np.arange(cells) * pool.num_pages // cells)
    most = np.maximum.reduceat(values, starts)
    requests = [
        {"name": _name(key), "pages": len(pages), "shared": int((owners[list(pages)] > 1).sum())}
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
        "owners": np.where(most == 1, -1, np.maximum(most - 1, 0)).tolist(),
        "requests": requests,
        "colours": COLOURS,
        "shades": shades(max(int(owners.max(initial=0)), 1)),
    }


def _name(key: Any) -> str:
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
