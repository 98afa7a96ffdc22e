"""Access rules: who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from paged_kv.serve.origins import Origins

Access: TypeAlias = Literal["open", "client", "metrics", "profile", "adapters"]
"""Who may call a route: everyone, whoever has the key, or with the key too an operator whose option is set."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class AccessRules:
    """The access rules of a server."""

    key: str | None = None
    """None: no key is required."""
    hosts: frozenset[str] = LOOPBACK
    """Names in lower case, without a port: of this server in Host, and of pages in Origin."""
    access: frozenset[Access] = frozenset({"open", "client"})
    """The kinds of routes that are served."""
    max_body_bytes: int = 1 << 18
    max_connections: int = 256
    origins: Origins = field(default_factory=Origins)
    """Pages of other servers that may send requests and read their answers."""


def host_name(authority: str) -> str:
    """The name or address in `name:port`, in lower case; of `[::1]:80` it is `::1`."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().removesuffix(".")
