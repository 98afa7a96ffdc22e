"""A block (CTA) of a PTX kernel on a model of a Hopper multiprocessor: its threads, shared memory, barriers and copies.

Threads run in random order, each until it has to wait. Modelled, each a failed assertion where a kernel breaks it:

- Copies of the TMA unit arrive late and in any order; until then their target holds ones (NaN).
- An mbarrier is fenced after its init before a copy completes it.
- What a thread stored to shared memory is behind its `fence.proxy.async` before a copy or a wgmma touches it.
- An `.aligned` instruction is met by all threads of a warp at the same place.
- A wgmma is issued by each of the four warps of a warpgroup when it comes to it, all in the same order: what one warp
  has stored for the products of another is behind a barrier.
- Products of wgmma are asynchronous (`ptx_wgmma.py`).
- A block does not load from global memory what another block of its grid has stored.

Not modelled: clusters, cycles, races between threads that no order of their running shows.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from gpu.model.ptx_shared import SharedMemory
from gpu.model.ptx_tensor_map import TensorMap
from gpu.model.ptx_units import PARAMETER_BYTES, PARAMETERS, Barrier, Barriers, Thread, source_lane
from gpu.model.ptx_wgmma import WARP_ROWS, Product, ProductForm, Products

if TYPE_CHECKING:
    from gpu.model.ptx_machine import Machine

ALIGNED = frozenset(("bar", "wgmma", "mma"))
"""The mark that a thread waits for at an `.aligned` instruction."""
WARPS = 4
"""Threads of a warpgroup."""
STEPS = 10_000
"""Instructions of a thread in one go: one that spins lets others run."""


class Warp:
    """32 threads and the matrix products that they have under way."""

    def __init__(self, threads: list[Thread]) -> None:
        self.threads = threads
        self.products = Products([t.registers for t in threads])
        self.touched = [t.touched for t in threads]
        self.issued: list[tuple] = []
        """Places and operands of its products: those of the other warps of the warpgroup."""


class Block:
    """A block of a grid. The machine has the program and global memory."""

    def __init__(
        self,
        machine: Machine,
        at: tuple[int, int, int],
        number: int,
        grid: tuple[int, int, int],
        threads: int,
        admitted: bool,
    ) -> None:
        self.machine = machine
        self.random: random.Random = machine.random
        self.code = machine.program.blocks
        self.shared = SharedMemory(machine.shared_bytes)
        self.owner = bytes([1 + number % 255])
        self.barriers = Barriers()
        self.copies: list[tuple[TensorMap, tuple[int, ...], int, Barrier]] = []
        self.threads = [Thread(i, at, grid, threads, admitted=admitted) for i in range(threads)]
        self.warps = [Warp(self.threads[i : i + 32]) for i in range(0, threads, 32)]
        self.slow = None if machine.slow_warp is None else self.warps[machine.slow_warp]

    # Memory

    def load(self, space: str, address: int, size: int, thread: int) -> bytes | bytearray:
        if space == "param":
            index, at = divmod(address - PARAMETERS, PARAMETER_BYTES)
            return self.machine.parameters[index][at : at + size]
        assert address % size == 0, "unaligned load"
        if space == "shared":
            return self.shared.load(address, size)
        early = not self.threads[thread].admitted
        assert not early or self.machine.may_load_early(address), "global memory before griddepcontrol.wait"
        return self.machine.load(address, size, self.owner)

    def store(self, space: str, address: int, raw: bytes, thread: int) -> None:
        assert address % len(raw) == 0, "unaligned store"
        if space == "shared":
            self.shared.store(address, raw, thread)
            return
        assert self.threads[thread].admitted, "global memory before griddepcontrol.wait"
        self.machine.store(address, raw, self.owner)

    def fence_proxy(self, thread: int) -> None:
        self.shared.fence_proxy(thread)
        self.barriers.fence(thread)

    @staticmethod
    def admit(t: Thread) -> None:
        """The grid before this one has ended."""
        t.admitted = True

    # mbarriers and copies

    def arrive(self, address: int, announced: int) -> None:
        """Arrives at an mbarrier, and announces bytes that copies will bring."""
        barrier = self.barriers[address]
        barrier.bytes += announced
        barrier.pending -= 1
        barrier.settle()

    def start_copy(self, thread: int, which: int, target: int, coordinates: tuple[int, ...], barrier: int) -> None:
        assert self.threads[thread].admitted, "global memory before griddepcontrol.wait"
        tensor_map = self.machine.tensor_map(which)
        assert target % (8 * tensor_map.swizzle or 128) == 0, "a copy's target"
        assert len(coordinates) == len(tensor_map.dims), "coordinates of a copy"
        self.shared.expect(target, tensor_map.box_bytes)
        self.copies.append((tensor_map, coordinates, target, self.barriers.of_copy(barrier)))

    def finish_copy(self) -> None:
        tensor_map, coordinates, target, barrier = self.copies.pop(self.random.randrange(len(self.copies)))
        data = self.machine.box(tensor_map, coordinates)
        self.shared.copy(target, data, tensor_map.swizzle)
        barrier.bytes -= data.size
        barrier.settle()

    # Tensor cores

    def issue(self, warp: Warp) -> bool:
        """A warp's 16 rows of a wgmma."""
        threads = warp.threads
        assert len({t.pc for t in threads}) == 1, "a wgmma met another"
        _, key, form = threads[0].waits_for
        assert isinstance(form, ProductForm)
        assert all(t.waits_for[1] == key for t in threads), "descriptors differ inside a warp"
        a, b, adds = key
        first = self.warps.index(warp) % WARPS * WARP_ROWS
        of_a = self.shared.operand(a, slice(first, first + WARP_ROWS), form.a_transposed)
        of_b = self.shared.operand(b, slice(0, form.columns), form.b_transposed)
        warp.products.issue(Product(form, adds, *of_a, *of_b), warp.touched)
        warp.issued.append((threads[0].pc, *key))
        return go_on(threads)

    # Threads

    @property
    def done(self) -> bool:
        return all(t.done for t in self.threads)

    def turn(self) -> bool:
        """Runs some of the threads, and perhaps a copy; whether anything moved."""
        moved = False
        for warp in self.random.sample(self.warps, len(self.warps)):
            if self.random.random() < (0.3 if warp is not self.slow else 0.97):
                continue
            for t in self.random.sample(warp.threads, 32):
                moved |= self.advance(t)
            moved |= self.release(warp, may_delay=True)
        if self.copies and self.random.random() < 0.3:
            self.finish_copy()
            moved = True
        if not moved and not self.copies:
            for warp in self.warps:
                for t in warp.threads:
                    moved |= self.advance(t)
                moved |= self.release(warp)
            return moved
        return True

    def end(self) -> None:
        """Check what must be over at the end of a block."""
        assert not self.copies, "copies still under way at the end of a block"
        for warp in self.warps:
            warp.products.end()
        for first in range(0, len(self.warps), WARPS):
            issued = [warp.issued for warp in self.warps[first : first + WARPS]]
            assert not any(issued) or (len(issued) == WARPS and all(one == issued[0] for one in issued)), (
                "the warps of a warpgroup have met different wgmmas"
            )

    def waits(self) -> list[tuple]:
        """Return what some of the threads wait for."""
        return [(t.index, t.waits_for[:2]) for t in self.threads if t.waits_for][:8]

    def advance(self, t: Thread) -> bool:
        """Runs a thread until it has to wait."""
        if t.done:
            return False
        if t.waits_for:
            if t.waits_for[0] != "wait" or self.barriers[t.waits_for[1]].completed & 1 == t.waits_for[2]:
                return False
            t.waits_for = None
        code, answer = self.code, t.pc
        try:
            for _ in range(STEPS):
                answer = code[answer](self, t)
                if not isinstance(answer, int):
                    break
            else:
                t.pc = answer
                return True
        except KeyError as error:
            raise AssertionError(f"{error} has no value, or belongs to a wgmma that is under way") from error
        t.done = answer[0] == "exit"
        assert t.admitted or not t.done, "a thread that ends without griddepcontrol.wait"
        t.waits_for = None if t.done else answer
        return True

    def release(self, warp: Warp, may_delay: bool = False) -> bool:
        """Releases threads that wait for each other and have all arrived, after this warp has run.

        Args:
            may_delay: A wait for products may last longer than this.
        """
        threads = warp.threads
        kinds = {t.waits_for[0] if t.waits_for else None for t in threads}
        if not kinds.isdisjoint(ALIGNED):
            check_aligned(threads)
        moved = False
        if len(kinds) == 1:
            (kind,) = kinds
            if kind == "shfl":
                assert len({t.pc for t in threads}) == 1, "a shuffle met another"
                values = [t.waits_for[2] for t in threads]
                for lane, t in enumerate(threads):
                    _, mode, _, argument, target = t.waits_for
                    t.registers[target] = values[source_lane(mode, lane, argument)]
            elif kind == "wgmma":
                if may_delay and warp.products.committed and self.random.random() < 0.5:
                    return False
                self.order_products(warp)
            if kind in ("warp", "shfl", "wgmma"):
                moved = go_on(threads)
            elif kind == "mma":
                moved = self.issue(warp)
        for barrier_id, count in {t.waits_for[1:3] for t in threads if t.waits_for and t.waits_for[0] == "bar"}:
            moved |= self.complete(barrier_id, count)
        return moved

    def order_products(self, warp: Warp) -> None:
        """A fence, commit or wait of a warp."""
        what = warp.threads[0].waits_for[1]
        if what == "fence":
            warp.products.fence(warp.touched)
        elif what == "commit_group":
            warp.products.commit()
        else:
            assert what == "wait_group", what
            warp.products.wait(self.shared.elements)

    def complete(self, barrier_id: int, count: int) -> bool:
        """Releases the threads at a named barrier if all have arrived."""
        here = [t for t in self.threads if t.waits_for and t.waits_for[:2] == ("bar", barrier_id)]
        assert len(here) <= count, "more threads at a barrier than it takes"
        assert all(t.waits_for[2] == count for t in here), "a barrier met with different counts"
        return len(here) == count and go_on(here)


def check_aligned(threads: list[Thread]) -> None:
    """Check a warp with a thread at an `.aligned` instruction: the others are there, or may still come."""
    assert not any(t.done for t in threads), "threads of a warp have left before an .aligned instruction"
    places = {t.pc for t in threads if t.waits_for and t.waits_for[0] != "wait"}
    assert len(places) == 1, "threads of a warp at different instructions, one of them .aligned"


def go_on(threads: list[Thread]) -> bool:
    for t in threads:
        t.waits_for = None
    return True
