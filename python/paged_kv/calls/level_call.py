"""Attention over several levels of tokens, and the merge of their states.

Letters in shapes: L levels, T query rows, Hq query heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import Attention, Scales
from paged_kv.calls.levels import LevelRows
from paged_kv.calls.merge_states import State, merge
from paged_kv.calls.plan import AttentionPlan, check_array

_FLOAT32 = np.dtype(np.float32)
_NO_SCALES: Scales = (None, None, None)


class LevelAttention(Attention):
    """An attention whose outputs are float32, to be merged before they are rounded to the planned dtype."""

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(replace(plan, o_dtype=_FLOAT32))
        self._result_dtype = plan.result_dtype

    def states(self, levels: LevelRows, device: ArrayDevice, q: Any, k: Any, v: Any) -> list[State]:
        """The states over each level's tokens: outputs `[T, Hq, D]` float32 and lse `[T, Hq]`, views on the device.

        Args:
            levels: The rows.
            device: That of q, k and v.
            q: A view `[T, Hq, D]`.
            k, v: `[page, slot, Hk, D]` views.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `Attention.run`.
        """
        plan, rows, number = self.plan, levels.num_rows, levels.num_levels
        shape = (rows, plan.num_qo_heads, plan.head_dim)
        check_array(device, "q", q, shape, plan.q_dtype, levels.rows.counted_as)
        if number > 1:
            q = device.stack([q] * number, 0).reshape(number * rows, *shape[1:])
        parts = self.run(device, q, k, v, levels.rows, _NO_SCALES)
        o, lse = (part.reshape(number, rows, *part.shape[1:]) for part in parts)
        return [(o[level], lse[level]) for level in range(number)]

    def merged(self, device: ArrayDevice, states: list[State]) -> State:
        """States of the same rows over disjoint tokens, merged: the output in the planned dtype, and the lse."""
        o, lse = states[0]
        if len(states) > 1:
            o, lse = merge(device, *(device.stack(part, 1) for part in zip(*states, strict=True)))
        return device.astype(o, self._result_dtype), lse
