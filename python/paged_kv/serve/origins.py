"""Pages of other servers that may read answers in a browser (CORS), and the answer to a browser that asks first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_kv.arguments import printable
from paged_kv.errors import ContractError

Headers = list[tuple[bytes, bytes]]

EXPOSED = b"x-request-id, request-id, retry-after, x-should-retry, x-ignored"
"""Headers of answers that such a page may read."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{0,2048}")
_SECONDS = b"600"
"""For which a browser need not ask again."""


@dataclass(frozen=True)
class Origins:
    """Pages that may read answers: those of an origin, and those of a host whatever its scheme and port."""

    exact: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """True if no page of another server may read anything."""
        return not self.exact and not self.hosts

    def allows(self, origin: str) -> bool:
        """Return whether a page of an origin, as a browser names it, may read answers."""
        match = _ORIGIN.fullmatch(origin.lower())
        return match is not None and (origin.lower() in self.exact or match[1].strip("[]") in self.hosts)

    def headers(self, origin: str | None) -> Headers:
        """Headers of every answer: they let a page of an allowed origin read it, and no other one."""
        if self.is_empty:
            return []
        vary = [(b"vary", b"Origin")]
        if origin is None or not self.allows(origin):
            return vary
        own = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [own, (b"access-control-expose-headers", EXPOSED), *vary]

    def preflight(self, requested: bytes) -> Headers:
        """Further headers for a browser that asks before a request; `requested` are names of headers that it has."""
        names = requested if _NAMES.fullmatch(requested) else b""
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", names or b"authorization, content-type, x-api-key"),
            (b"access-control-max-age", _SECONDS),
        ]


def read_origin(text: str) -> str:
    """An origin of the command line as browsers write it: lower case, without its scheme's own port.

    Raises:
        ContractError: it is none; `*` and `null` are none.
    """
    origin = text.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ContractError(f"--allowed-origin: expected SCHEME://HOST[:PORT], got {printable(repr(text))}")
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], "\0"))
