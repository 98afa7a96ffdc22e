"""Blocks of a PTX kernel on a model of a Hopper multiprocessor: enough of PTX for the kernels of mojo_ops.

Threads run in random order, copies of the TMA unit arrive late, and what is stored without a proxy fence is not to be
read by a wgmma: so a wrong index, a wait too few or too many (a deadlock), and a missing fence show without a GPU.
The model is written from the PTX manual, not from the kernel.
"""

import random

import numpy as np

from support.ptx_numbers import halves
from support.ptx_program import PARAMETER_BYTES, PARAMETERS, SHARED, Thread, program_of
from support.ptx_units import Barrier, TensorMap, operand_addresses, positions_of_sums, swizzled

GLOBAL = 1 << 33


class Machine:
    """A kernel and the memory that it sees.

    Args:
        ptx: The kernel's text.
        seed: Of the order in which threads run.
        memory: Global memory, where several kernels share it.
        shared_bytes: Of shared memory.
    """

    def __init__(
        self, ptx: str, seed: int = 0, memory: bytearray | None = None, shared_bytes: int = 227 * 1024
    ) -> None:
        self.program = program_of(ptx)
        self.random = random.Random(seed)
        self.memory = bytearray() if memory is None else memory
        self.shared = bytearray(shared_bytes + SHARED)
        self.unfenced = np.zeros(shared_bytes + SHARED, np.int32)  # the thread that stored, plus 1
        self.stored: dict[int, list[slice]] = {}  # by thread, since its latest fence
        self.parameters: list[bytes | TensorMap] = []
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[tuple[TensorMap, tuple[int, ...], int, int]] = []

    # Memory

    def allocate(self, array: np.ndarray) -> int:
        self.memory.extend(b"\0" * (-len(self.memory) % 256))
        address = GLOBAL + len(self.memory)
        self.memory.extend(np.ascontiguousarray(array).tobytes())
        return address

    def array(self, address: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, count, address - GLOBAL).copy()

    def load(self, space: str, address: int, size: int) -> bytes | bytearray:
        if space == "param":
            index, at = divmod(address - PARAMETERS, PARAMETER_BYTES)
            raw = self.parameters[index]
            assert isinstance(raw, bytes)
            return raw[at : at + size]
        assert address % size == 0, "unaligned load"
        if space == "shared":
            assert SHARED <= address <= len(self.shared) - size, "shared memory"
            return self.shared[address : address + size]
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
        return self.memory[at : at + size]

    def store(self, space: str, address: int, raw: bytes, thread: int) -> None:
        size = len(raw)
        assert address % size == 0, "unaligned store"
        if space == "shared":
            assert SHARED <= address <= len(self.shared) - size, "shared memory"
            span = slice(address, address + size)
            self.shared[span] = raw
            self.unfenced[span] = thread + 1
            self.stored.setdefault(thread, []).append(span)
        else:
            at = address - GLOBAL
            assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
            self.memory[at : at + size] = raw

    # mbarriers and copies

    def start_barrier(self, address: int, count: int) -> None:
        self.barriers[address] = Barrier(count, count)

    def arrive(self, address: int, announced: int) -> None:
        """Arrives at an mbarrier, and announces bytes that copies will bring."""
        barrier = self.barriers[address]
        barrier.bytes += announced
        barrier.pending -= 1
        barrier.settle()

    def start_copy(self, which: int, target: int, coordinates: tuple[int, ...], barrier: int) -> None:
        tensor_map = self.parameters[(which - PARAMETERS) // PARAMETER_BYTES]
        assert isinstance(tensor_map, TensorMap)
        size = tensor_map.slots * tensor_map.box_bytes
        assert target % 128 == 0, "a copy's target"
        # From now on until it has arrived, anything may be found there.
        self.shared[target : target + size] = b"\xff" * size
        self.copies.append((tensor_map, coordinates, target, barrier))

    def finish_copy(self) -> None:
        tensor_map, coordinates, target, barrier = self.copies.pop(self.random.randrange(len(self.copies)))
        data = tensor_map.box(*coordinates).reshape(-1)
        at = target + np.arange(data.size)
        if tensor_map.swizzled:
            at = swizzled(at)
        assert not self.unfenced[at].any(), "a copy overwrites what was stored without a fence"
        np.frombuffer(self.shared, np.uint8)[at] = data
        self.barriers[barrier].bytes -= data.size
        self.barriers[barrier].settle()

    def fence(self, thread: int) -> None:
        for span in self.stored.pop(thread, ()):
            part = self.unfenced[span]
            part[part == thread + 1] = 0

    # Tensor cores

    def operand(self, descriptor: int, rows: int, transposed: bool, kind: str) -> np.ndarray:
        """[rows, 16] float32."""
        at = operand_addresses(descriptor, rows, transposed)
        assert not self.unfenced[at].any(), "a wgmma reads what was stored without a fence"
        assert not self.unfenced[at + 1].any(), "a wgmma reads what was stored without a fence"
        return halves(np.frombuffer(self.shared, np.uint16)[at // 2], kind)

    def multiply(self, group: list[Thread]) -> None:
        _, (a, b, scale), _, columns, kind, a_transposed, b_transposed = group[0].waits_for
        assert all(t.waits_for[1] == (a, b, scale) for t in group), "descriptors differ inside a warpgroup"
        with np.errstate(invalid="ignore", over="ignore"):
            product = self.operand(a, 64, a_transposed, kind) @ self.operand(b, columns, b_transposed, kind).T
            sums = product[positions_of_sums(columns)]
            if scale:
                before = [[t.registers[register] for register in t.waits_for[2]] for t in group]
                sums = np.array(before, np.uint32).view(np.float32) + sums
        for t, bits in zip(group, sums.view(np.uint32).tolist(), strict=True):
            t.registers.update(zip(t.waits_for[2], bits, strict=True))

    # Threads

    def launch(self, grid: tuple[int, int, int], threads: int, parameters: list[bytes | TensorMap]) -> None:
        """Runs all blocks of a grid, one after the other."""
        self.parameters = list(parameters)
        for z, y, x in np.ndindex(*grid[::-1]):
            self.run((int(x), int(y), int(z)), grid, threads)

    def run(self, block: tuple[int, int, int], grid: tuple[int, int, int], threads: int) -> None:
        """Runs one block to its end."""
        self.shared[:] = b"\xff" * len(self.shared)
        self.unfenced[:] = 0
        self.stored.clear()
        self.barriers.clear()
        everyone = [Thread(i, block, grid, threads) for i in range(threads)]
        warps = [everyone[i : i + 32] for i in range(0, threads, 32)]
        while not all(t.done for t in everyone):
            moved = False
            for warp in self.random.sample(warps, len(warps)):
                if self.random.random() < 0.3:
                    continue
                for t in self.random.sample(warp, 32):
                    moved |= self.advance(t)
                moved |= self.release(everyone, warp)
            if self.copies and self.random.random() < 0.3:
                self.finish_copy()
                moved = True
            if not moved and not self.copies:
                for warp in warps:
                    for t in warp:
                        moved |= self.advance(t)
                    moved |= self.release(everyone, warp)
                assert moved, "deadlock: " + str([(t.index, t.waits_for[:2]) for t in everyone if t.waits_for][:8])
        assert not self.copies, "copies still under way at the end of a block"

    def advance(self, t: Thread) -> bool:
        """Runs a thread until it has to wait."""
        if t.done:
            return False
        if t.waits_for:
            if t.waits_for[0] != "wait" or self.barriers[t.waits_for[1]].completed & 1 == t.waits_for[2]:
                return False
            t.waits_for = None
        blocks = self.program.blocks
        answer: int | tuple = t.pc
        while isinstance(answer, int):
            answer = blocks[answer](self, t)
        t.done = answer[0] == "exit"
        t.waits_for = None if t.done else answer
        return True

    def release(self, everyone: list[Thread], warp: list[Thread]) -> bool:
        """Releases threads that wait for each other and have all arrived, after this warp has run."""
        kinds = {t.waits_for[0] if t.waits_for else None for t in warp}
        moved = False
        if kinds == {"warp"}:
            moved = go_on(warp)
        elif kinds == {"shfl"}:
            assert len({t.pc for t in warp}) == 1, "a shuffle met another"
            values = [t.waits_for[2] for t in warp]
            for lane, t in enumerate(warp):
                _, mode, _, argument, target = t.waits_for
                t.registers[target] = values[source_lane(mode, lane, argument)]
            moved = go_on(warp)
        elif kinds in ({"mma"}, {"group"}):
            first = warp[0].index // 128 * 128
            group = everyone[first : first + 128]
            if kinds == {t.waits_for[0] if t.waits_for else None for t in group} and len(group) == 128:
                assert len({t.pc for t in group}) == 1, "a wgmma met another"
                if kinds == {"mma"}:
                    self.multiply(group)
                moved = go_on(group)
        for barrier_id in {t.waits_for[1] for t in warp if t.waits_for and t.waits_for[0] == "bar"}:
            here = [t for t in everyone if t.waits_for and t.waits_for[:2] == ("bar", barrier_id)]
            assert len(here) <= here[0].waits_for[2], "more threads at a barrier than it takes"
            if len(here) == here[0].waits_for[2]:
                moved = go_on(here)
        return moved


def go_on(threads: list[Thread]) -> bool:
    for t in threads:
        t.waits_for = None
    return True


def source_lane(mode: str, lane: int, argument: int) -> int:
    if mode == "bfly":
        return lane ^ argument
    if mode == "up":
        return lane - argument if lane >= argument else lane
    assert mode == "idx", mode
    return argument & 31
