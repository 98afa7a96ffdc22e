"""The order of eviction, one for all: for known pages of a pool, files of the disk tier, blocks that a router knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
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
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)

    def hold(self, key: Key) -> None:
        """Takes a key that is in use out of the order, until `use`."""
        del self._keys[key]

    def forget(self, key: Key) -> None:
        """Forgets a key that is no more, in the order or held."""
        self._keys.pop(key, None)
