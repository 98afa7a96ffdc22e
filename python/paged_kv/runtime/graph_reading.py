"""A graph of MAX as plain data: its inputs, operations and outputs, for a program (`program.py`).

MAX has no public way to walk a graph; the names of its own that this takes are used here alone
(`tests/support/max_private.py` holds them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import numpy as np
from max._core.graph import _buffer_from_constant_attr
from max._mlir_context import ensure_default_mlir_context
from max.driver import CPU
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Dim, KernelLibrary, Module, StaticDim, SymbolicDim, TensorType
from max.graph.dim import AlgebraicDim

from paged_kv.errors import ContractError

Array = np.ndarray[Any, Any]
_BUILDING = Lock()


@contextmanager
def graph_building() -> Iterator[None]:
    """Graphs are built in it, by one thread at a time: MAX has entered its context in the main thread alone."""
    with _BUILDING, ensure_default_mlir_context():
        yield


class KernelsInLibraries(KernelLibrary):
    """The kernels of a graph that is only read: MAX is not asked whether they are there."""

    def verify_custom_op(self, custom_op: object) -> None:
        pass


class Word(NamedTuple):
    """A number of a call: `constant + coefficient * symbol`. Symbols are sizes of a step and addresses."""

    constant: int
    coefficient: int = 0
    symbol: str = ""

    def times(self, factor: int) -> Word:
        return Word(self.constant * factor, self.coefficient * factor, self.symbol if self.coefficient else "")

    def plus(self, offset: int) -> Word:
        return self._replace(constant=self.constant + offset)


@dataclass(eq=False)
class Value:
    """A tensor or a buffer of a graph."""

    shape: tuple[Word, ...]
    dtype: DType
    data: Array | None = None
    """The numbers of a constant."""
    weight: str = ""
    """The name of a weight."""
    source: Value | None = None
    """The value whose memory this one is, under another shape."""
    at: Word = field(default_factory=lambda: Word(0))
    """Its address."""

    @property
    def memory(self) -> Value:
        """The value that owns its memory."""
        return self if self.source is None else self.source.memory

    @property
    def address(self) -> Word:
        return self.memory.at

    @property
    def size(self) -> Word:
        """Its elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Word:
        return self.size.times(self.dtype.size_in_bytes)

    def static(self, axis: int) -> int:
        """A dimension that is known.

        Raises:
            UnknownGraph: it is symbolic.
        """
        word = self.shape[axis]
        if word.coefficient:
            raise UnknownGraph(f"dimension {axis} is symbolic")
        return word.constant

    def number(self) -> float:
        """A constant of one element."""
        if self.data is None or self.data.size != 1:
            raise UnknownGraph("expected a constant of one element")
        return self.data.reshape(-1)[0].item()


class Operation(NamedTuple):
    """One operation of a graph."""

    name: str
    """That of a registered op, or of MAX's class."""
    operands: list[Value]
    results: list[Value]
    parameters: Mapping[str, Any]


class ReadGraph(NamedTuple):
    """The operations of a graph in their order."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]

    @property
    def weights(self) -> list[str]:
        """The names of the weights that operations read."""
        read = [operand.memory.weight for op in self.operations for operand in op.operands]
        return [name for name in dict.fromkeys(read) if name]


class UnknownGraph(ContractError):
    """A graph has what a program does not know; MAX compiles it."""


def product(words: tuple[Word, ...]) -> Word:
    """The product of sizes, one of which may be symbolic.

    Raises:
        UnknownGraph: several are.
    """
    total = Word(1)
    for word in words:
        if word.coefficient and total.coefficient:
            raise UnknownGraph(f"sizes {total.symbol} and {word.symbol} are multiplied")
        if word.coefficient and word.constant:
            raise UnknownGraph(f"a size is {word.symbol} and a number")
        total = word.times(total.constant) if word.coefficient else total.times(word.constant)
    return total


def read_graph(module: Module, buffers: Sequence[Array | None], symbols: Mapping[str, int] | None = None) -> ReadGraph:
    """The one graph of a module.

    Args:
        module: It has one graph.
        buffers: For each input the array that it always is, whose sizes are then no symbols, or None.
        symbols: Sizes of other symbols.

    Raises:
        UnknownGraph: an operation or a shape is not known.
    """
    (graph,) = module.mlir_module.body
    block = graph.regions[0].front
    sizes = dict(symbols or {})
    for argument, buffer in zip(block.arguments, buffers, strict=True):
        if buffer is not None:
            shape = _value(argument.type, {}).shape
            sizes |= {word.symbol: size for word, size in zip(shape, buffer.shape, strict=True) if word.coefficient}
    values: dict[Any, Value] = {}
    inputs = []
    for argument in block.arguments:
        values[argument] = _value(argument.type, sizes)
        inputs.append(values[argument])
    operations: list[Operation] = []
    outputs: list[Value] = []
    for op in block:
        kind = type(op).__name__
        operands = [values[each] for each in _operands(op) if each in values]
        if kind == "OutputOp":
            outputs = operands
        elif kind in ("ChainCreateOp", "ParamDeclareOp", "ParamFromValueOp"):
            continue
        else:
            results = [result for result in op.results if type(result.type).__name__ != "ChainType"]
            made = [_value(result.type, sizes) for result in results]
            values.update(zip(results, made, strict=True))
            if kind == "ConstantOp":
                made[0].data = _constant(op.value, made[0])
            elif kind == "ConstantExternalOp":
                made[0].weight = op.name
            elif kind == "ReshapeOp":
                made[0].source = operands[0]
            elif kind.endswith("CustomOp"):
                operations.append(Operation(op.symbol, operands, made, _parameters(op)))
            else:
                operations.append(Operation(kind.removeprefix("Mo"), operands, made, {}))
    return ReadGraph(inputs, operations, outputs)


def _operands(op: Any) -> Iterator[Any]:
    for operand in op.operands:
        yield getattr(operand, "value", operand)


def _value(kind: Any, sizes: Mapping[str, int]) -> Value:
    name = type(kind).__name__
    if name not in ("TensorType", "BufferType"):
        raise UnknownGraph(f"a value of {name}")
    of_graph = (TensorType if name == "TensorType" else BufferType).from_mlir(kind)
    if of_graph.device != DeviceRef.CPU():
        raise UnknownGraph(f"a value on {of_graph.device}")
    return Value(tuple(_word(dim, sizes) for dim in of_graph.shape), of_graph.dtype)


def _word(dim: Dim, sizes: Mapping[str, int]) -> Word:
    if isinstance(dim, StaticDim):
        return Word(dim.dim)
    if isinstance(dim, SymbolicDim):
        return Word(sizes[dim.name]) if dim.name in sizes else Word(0, 1, dim.name)
    assert isinstance(dim, AlgebraicDim)
    factors = [part.strip() for part in str(dim).strip("()").split("*")]
    try:
        words = [Word(int(part)) if part.lstrip("-").isdigit() else _word(SymbolicDim(part), sizes) for part in factors]
    except ValueError:
        raise UnknownGraph(f"the size {dim}") from None
    return product(tuple(words))


def _parameters(op: Any) -> dict[str, Any]:
    """The parameters of a registered op: texts, flags and integers."""
    if op.parameters is None:
        return {}
    return {str(each.name): each.value.value for each in op.parameters.value}


def _constant(value: Any, of: Value) -> Array:
    shape = [word.constant for word in of.shape]
    buffer = _buffer_from_constant_attr(value, of.dtype, shape, CPU())
    if of.dtype == DType.bfloat16:  # NumPy takes it by no buffer
        return buffer.view(DType.uint16, shape).to_numpy().view(np.dtype("bfloat16"))
    array: Array = buffer.to_numpy()
    return array
