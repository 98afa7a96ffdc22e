"""The time of a program's runs: by operation, by layer, and what no kernel used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from paged_kv.runtime.graph_reading import Operation, Word
from paged_kv.runtime.libraries import kernel
from paged_kv.runtime.thread_pool import workers

_WHOLE_WEIGHTS = ("paged_kv_linear", "paged_kv_quantised_linear")
"""Operations that read all of their weights; others take some rows, or some experts."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
FIRST, LAST = "before the layers", "after the layers"
_COPIED = 1 << 27


@dataclass
class Part:
    """Some calls of a run."""

    name: str
    calls: int = 0
    ns: int = 0
    """In all runs."""
    weight_bytes: int = 0
    """Those that a run reads, of products by weights; 0 where it is not known how many."""
    flops: int = 0
    """Those of products by weights in all runs; 0 where it is not known how many."""


class _ProfiledCall(NamedTuple):
    operation: str
    layer: str
    weight_bytes: int
    flops: Word


class StepProfile:
    """The times of the calls of a program, in the runs that it was given to.

    A call's time ends where the next call begins.

    Args:
        operations: The program's.
        of_call: The number of the operation of each call.
        dtype: The dtype of its library of small ops.
    """

    def __init__(self, operations: Sequence[Operation], of_call: Sequence[int], dtype: str) -> None:
        self.dtype = dtype
        self.runs = 0
        self.run_ns = 0
        """All of the runs, the numbers of their calls and their outputs included."""
        self.begins = np.zeros(len(of_call) + 1, np.int64)
        """Nanoseconds of a clock at which each call of a run began, and the last one ended."""
        self._ns = np.zeros(len(of_call), np.int64)
        layers = list(layers_of(operations))
        read = [_ProfiledCall(operation_name(op), "", *_product(op)) for op in operations]
        self._calls = [read[op]._replace(layer=layers[op]) for op in of_call]
        self._sizes = dict.fromkeys((call.flops.symbol for call in self._calls if call.flops.coefficient), 0)

    def add(self, run_ns: int, sizes: Mapping[str, int]) -> None:
        """Adds a run, whose times lie in `begins`, and whose sizes `sizes` has by their symbols."""
        self.runs += 1
        self.run_ns += run_ns
        self._ns += np.diff(self.begins)
        for symbol in self._sizes:
            self._sizes[symbol] += sizes[symbol]

    @property
    def kernel_ns(self) -> int:
        """The time of all kernels in all runs."""
        return int(self._ns.sum())

    def by_operation(self) -> list[Part]:
        """The operations, the one that takes longest first."""
        return sorted(self._parts(lambda call: call.operation), key=lambda part: -part.ns)

    def by_layer(self) -> list[Part]:
        """The layers in their order, and what comes before and after them."""
        return self._parts(lambda call: call.layer)

    def _parts(self, name_of: Callable[[_ProfiledCall], str]) -> list[Part]:
        parts: dict[str, Part] = {}
        for call, ns in zip(self._calls, self._ns.tolist(), strict=True):
            part = parts.setdefault(name_of(call), Part(name_of(call)))
            part.calls += 1
            part.ns += ns
            part.weight_bytes += call.weight_bytes
            part.flops += call.flops.constant * self.runs
            part.flops += call.flops.coefficient * self._sizes.get(call.flops.symbol, 0)
        return list(parts.values())


def operation_name(op: Operation) -> str:
    """As people know an operation: `rms_norm`, or of MAX's class `AddOp` `add`."""
    return op.name.removeprefix("paged_kv_").removesuffix("Op").lower()


def _product(op: Operation) -> tuple[int, Word]:
    """The bytes of the weights that a product reads, and its floating-point operations; 0 of all else."""
    if op.name not in _WHOLE_WEIGHTS:
        return 0, Word(0)
    weights = [value for value in op.operands if value.memory.weight]
    x, columns = op.operands[0], sum(y.static(1) for y in op.results)
    return sum(value.bytes.constant for value in weights), x.shape[0].times(2 * x.static(1) * columns)


def layers_of(operations: Sequence[Operation]) -> Iterator[str]:
    """The layer of each operation: that of its weights, or of the last operation that had some."""
    here = FIRST
    for op in operations:
        for value in op.operands:
            if value.memory.weight:
                match = _LAYER.search(value.memory.weight)
                here = f"layer {match[1]}" if match else FIRST if here == FIRST else LAST
        yield here


@cache
def copied_bytes_per_second(dtype: str) -> float:
    """Return what a copy of 128 MB reads and writes a second, on the threads of calls, by the kernel that takes rows.

    Args:
        dtype: The dtype of the library of small ops that it is taken from.
    """
    x = np.ones((64, _COPIED // 64), np.uint8)
    y, rows = np.empty_like(x), np.arange(64, dtype=np.int32)
    addresses = [array.ctypes.data for array in (y, x, rows)]
    operands = np.array([*addresses, len(x), x.shape[1], len(x)], np.int64).tobytes()
    copy, best = kernel("take_rows", dtype), float("inf")
    for _ in range(6):
        began = perf_counter_ns()
        copy(operands + workers())
        best = min(best, perf_counter_ns() - began)
    return 2 * x.nbytes / best * 1e9
