"""The order of eviction, one for all: cached pages of a pool, files of the disk tier, blocks that a router knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Generic[Key]):
    """Keys in the order in which they are evicted: the one used least recently first.

    Of keys that were used together, a prefix in its order, the last goes first: the others are of use without it.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def first(self, count: int) -> list[Key]:
        """The `count` keys that are evicted next; all where there are fewer."""
        return list(islice(self._keys, count))

    def use(self, keys: Sequence[Key]) -> None:
        """Says that a prefix was used until now. Its keys may be new."""
        order = self._keys
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)
            else:
                order[key] = None

    def hold(self, keys: Iterable[Key]) -> list[Key]:
        """Takes keys that are in use out of the order, until `use`; returns those that were held already."""
        held = []
        for key in keys:
            if key in self._keys:
                del self._keys[key]
            else:
                held.append(key)
        return held

    def forget(self, keys: Iterable[Key]) -> list[Key]:
        """Forgets keys that are no more; returns those that were not held."""
        free = [key for key in keys if key in self._keys]
        for key in free:
            del self._keys[key]
        return free
