"""Unknown parts of requests: ignored and named to the client, or refused by `--strict`."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger("paged_kv.serve")

HEADER = "x-ignored"
"""The header of an answer that names what was ignored."""
_MOST_LOGGED = 1024
"""Different messages that are logged: clients choose the names in them."""
_MOST_PATHS = 64
_MOST_CHARACTERS = 1024
"""The longest header."""
_INDEX = re.compile(r"\[\d+\]")
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]$@/:-]")


class UnknownParts:
    """A server's policy for unknown parts of requests. Each kind is logged once.

    Args:
        strict: Whether they are refused.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._logged: set[str] = set()

    def log(self, path: str, problem: str) -> None:
        """Log a part that is ignored, unless one of its kind was logged before."""
        message = f"{_INDEX.sub('[]', path)}: {problem}"
        if message not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(message)
            logger.warning("ignored: %s (logged once; --strict refuses it)", message)


class Ignored:
    """The parts of one request that were ignored, in their order.

    Args:
        policy: The server's; a strict one by default.
    """

    def __init__(self, policy: UnknownParts | None = None) -> None:
        self._policy = policy or UnknownParts(strict=True)
        self.paths: list[str] = []

    def add(self, path: str, error: Exception, problem: str) -> None:
        """Note a part, or refuse it.

        Args:
            path: Its name from the body on.
            error: Is raised by a strict server.
            problem: What the log says behind the path.
        """
        if self._policy.strict:
            raise error
        self._policy.log(path, problem)
        if len(self.paths) < _MOST_PATHS and path not in self.paths:
            self.paths.append(path)

    def headers(self) -> dict[str, str]:
        """The header of the answer: the paths in printable ASCII; none where all of the request was read."""
        named = ", ".join(_ODD.sub("?", path) for path in self.paths)
        if len(named) > _MOST_CHARACTERS:
            named = named[:_MOST_CHARACTERS].rpartition(",")[0] + ", ..."
        return {HEADER: named} if named else {}
