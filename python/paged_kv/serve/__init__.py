"""Model families for MAX Serve, with this package's kernels: `max serve --custom-architectures paged_kv.serve ...`.

MAX brings the scheduler, the pages, the prefix cache and the OpenAI API; the graph of a step is the one that
`paged_kv.engine` runs. It needs the `serve` extra.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ARCHITECTURES"]


def __getattr__(name: str) -> Any:
    """`ARCHITECTURES`, which MAX reads; not imported for `paged-kv serve`, which first looks whether MAX can run."""
    if name == "ARCHITECTURES":
        from paged_kv.serve.architectures import ARCHITECTURES

        return ARCHITECTURES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
