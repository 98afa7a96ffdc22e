"""The prompts whose pages each replica has, as a router remembers it; and which replica a prompt goes to.

A prompt is cut into blocks of a page's tokens, and a block is known by a hash of itself and of all blocks before it: a
tree of prefixes without pointers. Of each replica as many blocks are remembered as it has pages, and forgotten in the
order in which its pool evicts (`EvictionOrder`). What is remembered is a guess; a wrong one costs time and changes no
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np

from paged_kv.arguments import integer
from paged_kv.errors import ContractError
from paged_kv.pool import EvictionOrder

SLACK = 4
"""Requests that a replica may have more than the one with the fewest, and still get those whose pages it has."""


def blocks_of(tokens: Sequence[int], size: int, root: bytes = b"") -> list[int]:
    """The hashes of a prompt's full blocks of `size` tokens, each with all tokens before it, from 0 to 2^64.

    `root` tells namespaces apart. The same in every process.
    """
    data, width = np.asarray(tokens, np.int64).tobytes(), 8 * size
    blocks, before = [], root
    for at in range(0, len(tokens) // size * width, width):
        before = blake2b(data[at : at + width], digest_size=8, key=before[:64]).digest()
        blocks.append(int.from_bytes(before, "little"))
    return blocks


class Prefixes:
    """The blocks of replicas, which come and go by name.

    Args:
        limit: Blocks to remember of each replica: its pages.
        slack: As `SLACK`.

    Raises:
        ContractTypeError, ContractError: a number is none, or is too small.
    """

    def __init__(self, limit: int, slack: int = SLACK) -> None:
        self._limit = integer("limit", limit, 1)
        self._slack = integer("slack", slack, 0)
        self._holders: dict[int, int] = {}  # of a block: a bit for each replica that has it
        self._names: list[str | None] = []  # by bit
        self._bits: dict[str, int] = {}
        self._orders: list[EvictionOrder[int]] = []  # by bit: the blocks

    def __len__(self) -> int:
        """Blocks that are remembered, each counted once."""
        return len(self._holders)

    @property
    def names(self) -> frozenset[str]:
        """The replicas that are here."""
        return frozenset(self._bits)

    def count(self, name: str) -> int:
        """Blocks of a replica."""
        return len(self._orders[self._bits[name]])

    def join(self, name: str) -> None:
        """A replica comes, with empty pages. Raises a ContractError where it is there."""
        if name in self._bits:
            raise ContractError(f"name: duplicate replica {name!r}")
        bit = self._names.index(None) if None in self._names else len(self._names)
        if bit == len(self._names):
            self._names.append(None)
            self._orders.append(EvictionOrder())
        self._names[bit], self._bits[name] = name, bit

    def leave(self, name: str) -> None:
        """A replica goes, or has died, and its pages with it. One that is unknown has gone before."""
        bit = self._bits.pop(name, None)
        if bit is None:
            return
        for block in self._orders[bit]:
            self._drop(block, bit)
        self._names[bit], self._orders[bit] = None, EvictionOrder()

    def insert(self, name: str, blocks: Sequence[int]) -> None:
        """A prompt went to a replica: its blocks are there from then on, and used now."""
        bit = self._bits[name]
        order, mine = self._orders[bit], 1 << bit
        order.use(blocks[: self._limit])
        for block in blocks[: self._limit]:
            self._holders[block] = self._holders.get(block, 0) | mine
        for block in order.forget(order.first(max(len(order) - self._limit, 0))):
            self._drop(block, bit)

    def match(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each replica has; those that have none are left out."""
        depths: dict[str, int] = {}
        here = -1  # who has all blocks so far
        for depth, block in enumerate([*blocks, None]):
            now = 0 if block is None else self._holders.get(block, 0) & here
            gone = here & ~now if depth else 0
            while gone > 0:
                bit = (gone & -gone).bit_length() - 1
                gone &= gone - 1
                name = self._names[bit]
                if name is not None:
                    depths[name] = depth
            here = now
            if not here:
                break
        return depths

    def rank(self, blocks: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas in the order in which a prompt should be offered to them.

        Load comes first: who has more than `slack` requests more than the one with the fewest comes last. Of the others
        the one that has the fewest blocks to compute is first. A block that a full replica computes costs it another
        one, so it counts twice: new prompts spread once a replica is full. Of equals the one with fewer requests is
        first, then that with fewer blocks, then one that depends on the prompt's first block alone, so that routers
        which have not met agree.

        Args:
            blocks: The blocks of the prompt.
            loads: Requests that each replica has; the replicas that may be chosen.
        """
        if not loads:
            return []
        matched, most = self.match(blocks), min(loads.values()) + self._slack
        first = b"%d" % blocks[0] if blocks else b""

        def order(name: str) -> tuple[int, ...]:
            load, held = loads[name], self.count(name) if name in self._bits else 0
            tie = crc32(first + name.encode())
            if load > most:
                return (1, load, held, tie)
            missing = len(blocks) - matched.get(name, 0)
            crowded = held + missing > self._limit
            return (0, missing * (2 if crowded else 1), load, held, tie)

        return sorted(loads, key=order)

    def _drop(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~(1 << bit)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
