"""A PTX kernel on a model of a GPU: enough of PTX for the kernels of mojo_ops.

`ptx_block.py` says what is modelled of a block, and what a kernel must not do. Blocks run in random order, some of them
at once. So a wrong index, a wait too few or too many (a deadlock), and a missing fence show without a GPU. The model is
written from the PTX manual, not from the kernel.
"""

import random
from collections.abc import Sequence

import numpy as np

from gpu.model.ptx_block import Block
from gpu.model.ptx_program import program_of
from gpu.model.ptx_tensor_map import TensorMap
from gpu.model.ptx_units import PARAMETER_BYTES, PARAMETERS

GLOBAL = 1 << 33


class Machine:
    """A kernel and the memory that it sees.

    Args:
        ptx: The kernel's text.
        seed: The seed of the order in which threads and blocks run.
        memory: Global memory, where several kernels share it.
        shared_bytes: The shared memory of a block, in bytes.
        slow_warp: A warp of each block that seldom runs while another one can.
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
        self.parameters: list[bytes | TensorMap] = []
        self.written: Sequence[range] | None = None
        self.owners = bytearray()
        """For each byte of memory the block of the grid that has stored it, 0 for none."""

    # Memory

    def allocate(self, array: np.ndarray) -> int:
        self.memory.extend(b"\0" * (-len(self.memory) % 256))
        address = GLOBAL + len(self.memory)
        self.memory.extend(np.ascontiguousarray(array).tobytes())
        return address

    def array(self, address: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, count, address - GLOBAL).copy()

    def load(self, address: int, size: int, owner: bytes) -> bytes | bytearray:
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
        others = self.owners[at : at + size].strip(b"\0" + owner)
        assert not others, "a load of what another block stored: nothing orders it after the store"
        return self.memory[at : at + size]

    def may_load_early(self, address: int) -> bool:
        """Before the grid before has ended."""
        return self.written is not None and not any(address in part for part in self.written)

    def store(self, address: int, raw: bytes, owner: bytes) -> None:
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - len(raw), f"global address {address:x}"
        self.owners[at : at + len(raw)] = owner * len(raw)
        self.memory[at : at + len(raw)] = raw

    def tensor_map(self, address: int) -> TensorMap:
        """The parameter at this address."""
        index, at = divmod(address - PARAMETERS, PARAMETER_BYTES)
        found = self.parameters[index]
        assert at == 0, "a tensor map's address"
        assert isinstance(found, TensorMap), "a tensor map's address"
        return found

    def box(self, tensor_map: TensorMap, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes that a copy brings."""
        return tensor_map.copied(np.frombuffer(self.memory, np.uint8), tensor_map.address - GLOBAL, coordinates)

    # Blocks

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Sequence[bytes | TensorMap],
        at_once: int = 1,
        follows: bool = False,
        written: Sequence[range] | None = None,
    ) -> None:
        """Runs all blocks of a grid in random order, `at_once` of them interleaved.

        A grid that `follows` another may begin before that one has ended: it touches no global memory before
        `griddepcontrol.wait`, which all threads come to. With `written`, the addresses that the other one writes, it
        may load from elsewhere.
        """
        self.parameters = list(parameters)
        self.written = written
        self.owners = bytearray(len(self.memory))
        indices = [(int(x), int(y), int(z)) for z, y, x in np.ndindex(*grid[::-1])]
        waiting = self.random.sample(indices, len(indices))
        running: list[Block] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                at = waiting.pop()
                running.append(Block(self, at, indices.index(at), grid, threads, admitted=not follows))
            moved = False
            for block in self.random.sample(running, len(running)):
                moved |= block.turn()
                if block.done:
                    block.end()
                    running.remove(block)
            assert moved, "deadlock: " + str([block.waits() for block in running])
