"""Events of a page pool, and who listens to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NamedTuple

EventKind = Literal["allocated", "shared", "copied", "released", "stored", "hit", "evicted"]


class PageEvent(NamedTuple):
    """An event of some pages.

    "allocated": a request got them. "shared": a request became one more owner. "copied": a request got the second as
    its own copy of the first. "released": a request owns them no more. "stored": their tokens are cached from now on.
    "hit": a request begins with them, because its prompt begins with their tokens. "evicted": their tokens are no
    longer cached; no request is named.
    """

    kind: EventKind
    request_id: Hashable
    pages: tuple[int, ...]


Listener = Callable[[PageEvent], Any]


class Events:
    """Events of the operation in progress, and their listeners."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._pending: list[PageEvent] = []

    def add(self, kind: EventKind, request_id: Hashable, pages: Iterable[int]) -> None:
        """Notes an event that has pages, where somebody listens."""
        if self.listeners and (page_ids := tuple(pages)):
            self._pending.append(PageEvent(kind, request_id, page_ids))

    def tell(self) -> None:
        """Calls the listeners. What they raise is printed: the operation has been done."""
        pending, self._pending = self._pending, []
        for event in pending:
            for listener in self.listeners:
                try:
                    listener(event)
                except Exception:
                    sys.excepthook(*sys.exc_info())
