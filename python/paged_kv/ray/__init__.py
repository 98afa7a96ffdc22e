"""More than one machine, on Ray: replicas behind one ingress, and offline batches (docs/scaling.md).

It needs the extra `ray`; nothing else of the package imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_kv.ray.application import Arguments, app
    from paged_kv.ray.offline import generate

__all__ = ["Arguments", "app", "generate"]

_HOME = {"Arguments": "application", "app": "application", "generate": "offline"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paged_kv.ray' has no attribute {name!r}")
    return getattr(import_module(f"paged_kv.ray.{_HOME[name]}"), name)
