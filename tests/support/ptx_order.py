"""Which stores to global memory a thread may rely on: the order that barriers, fences and atomics make between blocks.

A plain load of what another thread stored is a fault unless the store happened before it. That is so if the storing
thread, or one that a barrier ordered after it, has released a value, and the loading one, or one that a barrier ordered
before it, has acquired that value:

    release   an atomic or a store with .release or .acq_rel, or a fence and then any atomic or strong store
    acquire   an atomic or a load with .acquire or .acq_rel, or any atomic or strong load and then a fence

A fence counts for the thread that makes it: with one thread's atomic goes the same thread's fence.
Fences and atomics of scope .cta do nothing between blocks. Not modelled: stores over stores, stores after loads, the
proxies of global memory, and order by volatile accesses alone.

A thread's own time is counted in epochs, one more after each release. What it knows of others is, for each block, the
epoch of each of the block's threads up to which it may rely on their stores.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

Knowledge = dict[int, np.ndarray]
"""By block, an epoch for each thread. Never changed once it is handed on."""
WORD = 4


def merged(parts: Iterable[Knowledge]) -> Knowledge:
    result: Knowledge = {}
    for part in {id(part): part for part in parts}.values():
        for block, epochs in part.items():
            result[block] = np.maximum(result[block], epochs) if block in result else epochs
    return result


@dataclass
class Order:
    """Of the blocks of one launch."""

    stores: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Block, thread and epoch of the last plain store, by word."""
    messages: dict[Hashable, Knowledge] = field(default_factory=dict)
    """What comes with a value or a barrier."""


class BlockOrder:
    """Of the threads of one block, by their index.

    Args:
        order: What all blocks share.
        block: Its number in the grid.
    """

    def __init__(self, order: Order, block: int, threads: int) -> None:
        self.order, self.block = order, block
        self.epochs = np.ones(threads, np.int64)
        nothing = {block: np.zeros(threads, np.int64)}
        self.known: list[Knowledge] = [nothing] * threads
        self.fenced: list[Knowledge] = [{}] * threads
        """What was known at the latest fence."""
        self.found: list[Knowledge] = [{}] * threads
        """What has come with strong loads and atomics; a fence makes it known."""

    # Accesses

    def load(self, thread: int, address: int, size: int) -> None:
        for word in range(address // WORD, -(-(address + size) // WORD)):
            block, other, epoch = self.order.stores.get(word, (self.block, thread, 0))
            if (block, other) == (self.block, thread):
                continue
            known = self.known[thread].get(block)
            assert known is not None, f"a load of what block {block} stored: nothing orders it after the store"
            assert known[other] >= epoch, (
                f"a load of what thread {other} of block {block} stored: nothing orders it after the store"
            )

    def store(self, thread: int, address: int, size: int) -> None:
        entry = self.block, thread, int(self.epochs[thread])
        for word in range(address // WORD, -(-(address + size) // WORD)):
            self.order.stores[word] = entry

    def strong_load(self, thread: int, address: int, acquire: bool) -> None:
        """Of an atomic, or a load that is not plain."""
        found = self.order.messages.get(address, {})
        self.found[thread] = merged([self.found[thread], found])
        if acquire:
            self.known[thread] = merged([self.known[thread], found])

    def strong_store(self, thread: int, address: int, release: bool) -> None:
        messages = self.order.messages
        message = self.release(thread) if release else self.fenced[thread]
        messages[address] = merged([messages.get(address, {}), message])

    def fence(self, thread: int) -> None:
        self.known[thread] = merged([self.known[thread], self.found[thread]])
        self.fenced[thread] = self.release(thread)

    def release(self, thread: int) -> Knowledge:
        """What who acquires this will know: what the thread knows, and its own stores up to now."""
        own = self.known[thread][self.block].copy()
        own[thread] = self.epochs[thread]
        self.epochs[thread] += 1
        return {**self.known[thread], self.block: own}

    # Barriers of the block

    def join(self, threads: list[int], key: Hashable = None) -> None:
        """They have met at a barrier, and those that only arrived at `key`."""
        everything = merged([*(self.known[t] for t in threads), self.order.messages.pop((self.block, key), {})])
        own = everything[self.block].copy()
        own[threads] = self.epochs[threads]  # what they have stored so far
        self.epochs[threads] += 1
        everything[self.block] = own
        for t in threads:
            self.known[t] = everything

    def arrive(self, thread: int, key: Hashable) -> None:
        """At a barrier of the block that others wait for."""
        place = self.block, key
        self.order.messages[place] = merged([self.order.messages.get(place, {}), self.release(thread)])

    def wait(self, thread: int, key: Hashable) -> None:
        """For what has arrived at `key`."""
        self.known[thread] = merged([self.known[thread], self.order.messages.get((self.block, key), {})])
