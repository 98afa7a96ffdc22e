"""The states of recurrent layers inside a graph, as the ops take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, TensorValue

from paged_kv.errors import ContractError
from paged_kv.graphs.checks import check_dtype, check_rank, check_value
from paged_kv.graphs.inputs import StateInputs
from paged_kv.graphs.paged_cache import constant


@dataclass(frozen=True)
class States:
    """The slots of a model's states, and where a step reads and saves them (`inputs.StateInputs`). CPU only."""

    table: StateInputs[TensorValue, BufferValue]
    row_offsets: TensorValue
    """`[B + 1]` uint32: request `b` has rows `row_offsets[b]` to `row_offsets[b + 1]`."""
    layer: int = 0
    """The place of a layer among those that are recurrent."""

    @staticmethod
    def of(table: StateInputs[TensorValue, BufferValue], row_offsets: TensorValue) -> States:
        """The states of a step with these rows.

        Raises:
            ContractError, ContractTypeError, ShapeError: device, dtype or rank of a tensor or buffer.
        """
        cpu = DeviceRef.CPU()
        for name, value, dtype in (
            ("row_offsets", row_offsets, DType.uint32),
            ("sources", table.sources, DType.int32),
            ("save_offsets", table.save_offsets, DType.uint32),
            ("save_counts", table.save_counts, DType.int32),
            ("save_slots", table.save_slots, DType.int32),
        ):
            check_value(name, value, dtype, [None], cpu)
        if not 1 <= len(table.buffers) <= 2:
            raise ContractError(f"buffers: expected windows and perhaps matrix states, got {len(table.buffers)}")
        for buffer, rank in zip(table.buffers, (4, 6), strict=False):
            check_dtype("buffers", buffer.dtype, [DType.float32])
            check_rank("buffers", buffer, rank)
        return States(table, row_offsets)

    def of_layer(self, layer: int) -> States:
        """The states of one layer."""
        return replace(self, layer=layer)

    @property
    def windows(self) -> BufferValue:
        """The last inputs of convolutions: `[slots, layers, kernel - 1, channels]` float32."""
        return self.table.buffers[0]

    @property
    def matrices(self) -> BufferValue:
        """Matrix states: `[slots, layers, heads, blocks, key_dim, 16]` float32.

        Raises:
            ContractError: there are none.
        """
        if len(self.table.buffers) < 2:
            raise ContractError("buffers: expected matrix states beside the windows, got none")
        return self.table.buffers[1]

    def operands(self, buffer: BufferValue) -> list[BufferValue | TensorValue]:
        """Return what every op over states takes after its own tensors."""
        table = self.table
        layer = constant(np.array([self.layer], np.int64))
        where = (self.row_offsets, table.sources, table.save_offsets, table.save_counts, table.save_slots)
        return [buffer, layer, *where]
