"""The numbers of one kind of memory, pages or slots of state: free, cached or owned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from paged_kv.pool.eviction import EvictionOrder


class Units:
    """`count` numbers from 0 on. What is owned, and by how many, is counted here; by whom, the caller knows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.contents: dict[int, Any] = {}  # of each that is cached for sharing, owned or not, its content
        self.returned: list[int] = []  # those that were owned and are free; the last is taken first, then fresh ones
        self.fresh = 0  # this one and those above were never owned
        self.cached: EvictionOrder[int] = EvictionOrder()  # those with contents and without an owner
        self.shared: dict[int, int] = {}  # those with more than one owner, and how many

    def settle(self, owners: Counter[int]) -> None:
        """Computes again all but `contents`, from the number of owners of each."""
        self.shared = {unit: count for unit, count in owners.items() if count > 1}
        self.cached.forget([unit for unit in self.cached if unit not in self.contents])
        self.cached.hold(owners)
        self.cached.use([unit for unit in self.contents if unit not in owners and unit not in self.cached])
        self.fresh = 1 + max((*owners, *self.contents), default=-1)
        taken = owners.keys() | self.contents.keys()
        self.returned = [unit for unit in reversed(range(self.fresh)) if unit not in taken]

    def num_free(self) -> int:
        """Those that have no owner and no content."""
        return self.count - self.fresh + len(self.returned)

    def take(self, count: int) -> list[int]:
        """Takes free ones, of which there are enough: the one that was returned last first."""
        remaining = max(len(self.returned) - count, 0)
        taken = self.returned[remaining:][::-1]
        begin, self.fresh = self.fresh, self.fresh + count - len(taken)
        del self.returned[remaining:]
        return [*taken, *range(begin, self.fresh)]

    def own(self, units: Iterable[int]) -> None:
        """Counts one more owner of some that are owned or cached."""
        for unit in self.cached.hold(units):
            self.shared[unit] = self.shared.get(unit, 1) + 1

    def release(self, units: Iterable[int]) -> None:
        """Counts one owner less of some; pages are given in token order."""
        shared, contents = self.shared, self.contents
        free: list[int] = []
        cached: list[int] = []
        for unit in units:
            count = shared.get(unit)
            if count is None:
                (cached if unit in contents else free).append(unit)
            elif count > 2:
                shared[unit] = count - 1
            else:
                del shared[unit]
        self.returned += reversed(free)
        self.cached.use(cached)

    def forget(self, units: Sequence[int]) -> None:
        """Forgets the contents of some; those that are cached become free, the first on top."""
        for unit in units:
            del self.contents[unit]
        self.returned += reversed(self.cached.forget(units))
