"""Values that are made when a test first asks for them, so that a run of few tests makes few."""

from collections.abc import Callable
from typing import Any


class Made(dict[str, Any]):
    """`make` of each name."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]
