"""A PTX kernel on a model of a GPU: enough of PTX for the kernels of mojo_ops.

`ptx_block.py` says what is modelled of a block, and what a kernel must not do. Blocks run in random order, some of them
at once. So a wrong index, a wait too few or too many (a deadlock), and a missing fence show without a GPU. The model is
written from the PTX manual, not from the kernel.
"""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from support.ptx_block import Block
from support.ptx_order import BlockOrder, Order
from support.ptx_program import program_of
from support.ptx_tensor_map import MAP_BYTES, TensorMap
from support.ptx_units import PARAMETER_BYTES, PARAMETERS

GLOBAL = 1 << 33


class Machine:
    """A kernel and the memory that it sees.

    Args:
        ptx: The kernel's text.
        seed: Of the order in which threads and blocks run.
        memory: Global memory, where several kernels share it.
        shared_bytes: Of shared memory of a block.
        slow_warp: Of each block: it seldom runs while another one can.
    """

    def __init__(
        self,
        ptx: str,
        seed: int = 0,
        memory: bytearray | None = None,
        shared_bytes: int = 227 * 1024,
        slow_warp: int | None = None,
    ) -> None:
        self.program = program_of(ptx)
        self.random = random.Random(seed)
        self.memory = bytearray() if memory is None else memory
        self.shared_bytes = shared_bytes
        self.slow_warp = slow_warp
        self.parameters: list[bytes] = []
        self.written: Sequence[range] | None = None

    # Memory

    def allocate(self, array: np.ndarray) -> int:
        self.memory.extend(b"\0" * (-len(self.memory) % 256))
        address = GLOBAL + len(self.memory)
        self.memory.extend(np.ascontiguousarray(array).tobytes())
        return address

    def array(self, address: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, count, address - GLOBAL).copy()

    def load(self, address: int, size: int) -> bytes | bytearray:
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
        return self.memory[at : at + size]

    def may_load_early(self, address: int) -> bool:
        """Before the grid before has ended."""
        return self.written is not None and not any(address in part for part in self.written)

    def store(self, address: int, raw: bytes) -> None:
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - len(raw), f"global address {address:x}"
        self.memory[at : at + len(raw)] = raw

    def tensor_map(self, address: int) -> TensorMap:
        """The one among the parameters that begins at this address."""
        index, at = divmod(address - PARAMETERS, PARAMETER_BYTES)
        assert at % 64 == 0, "a tensor map's alignment"
        return decoded(self.parameters[index][at : at + MAP_BYTES])

    def box(self, tensor_map: TensorMap, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes that a copy brings."""
        return tensor_map.copied(np.frombuffer(self.memory, np.uint8), tensor_map.address - GLOBAL, coordinates)

    # Blocks

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        parameters: list[bytes],
        at_once: int = 1,
        follows: bool = False,
        written: Sequence[range] | None = None,
    ) -> None:
        """Runs all blocks of a grid in random order, `at_once` of them interleaved.

        Where several run at once, loads are held against the order of stores between blocks (`ptx_order.py`). A grid
        that `follows` another may begin before that one has ended: it touches no global memory before
        `griddepcontrol.wait`, which all threads come to. With `written`, the addresses that the other one writes, it
        may load from elsewhere.
        """
        self.parameters = list(parameters)
        self.written = written
        order = Order() if at_once > 1 else None
        indices = [(int(x), int(y), int(z)) for z, y, x in np.ndindex(*grid[::-1])]
        waiting = self.random.sample(indices, len(indices))
        running: list[Block] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                at = waiting.pop()
                of_block = None if order is None else BlockOrder(order, indices.index(at), threads)
                running.append(Block(self, at, grid, threads, self.shared_bytes, of_block, admitted=not follows))
            moved = False
            for block in self.random.sample(running, len(running)):
                moved |= block.turn()
                if block.done:
                    block.end()
                    running.remove(block)
            assert moved, "deadlock: " + str([block.waits() for block in running])


@cache
def decoded(raw: bytes) -> TensorMap:
    return TensorMap.decode(raw)
