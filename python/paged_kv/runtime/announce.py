"""Messages on a terminal before something that takes long."""

from __future__ import annotations

import sys


def announce(line: str) -> None:
    """Print one line on a terminal; nothing in logs and pipes."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
