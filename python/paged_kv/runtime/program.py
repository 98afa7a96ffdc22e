"""A step as a program: a flat list of calls of kernels, read once from its graph, which one Mojo function makes.

Each number of a call is `constant + coefficient * symbol` (`graph_reading.Word`). The symbols are sizes of a step
(tokens, requests, rows), the addresses of its inputs and outputs, and those of the slots of an arena, in which values
lie from the call that makes them to the last one that reads them.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from threading import Lock
from time import perf_counter_ns
from typing import Any

import numpy as np

from paged_kv.call_layouts import PROGRAM, WORKERS
from paged_kv.errors import ContractError
from paged_kv.runtime.forks import renew_in_children
from paged_kv.runtime.graph_reading import Array, Operation, ReadGraph, UnknownGraph, Value, Word
from paged_kv.runtime.libraries import Kernel, load, text_at
from paged_kv.runtime.program_ops import MEMBERS, KernelCall, Layers, calls_of_all
from paged_kv.runtime.step_profile import StepProfile
from paged_kv.runtime.thread_pool import workers

_LINE = 64
"""Bytes of a line of the CPU's caches, on which each slot begins."""
Watch = Callable[[int, Operation, Sequence[Array]], None]
_WORDS = "words"
"""The symbol of the address of the numbers themselves."""


class Slot:
    """A part of the arena."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = Word(0)
        self.free_after = -1
        """The last call that reads what lies in it."""

    def holds(self, size: Word) -> bool:
        """Return whether its size grows with the same symbol."""
        return self.size.symbol == size.symbol

    def take(self, size: Word) -> None:
        """Grows it to hold a value of this size too."""
        constant, coefficient = max(self.size.constant, size.constant), max(self.size.coefficient, size.coefficient)
        self.size = Word(constant, coefficient, size.symbol)


class Program:
    """The calls of one graph, bound to its weights and buffers.

    Args:
        graph: As `read_graph` gives it.
        weights: Arrays by the names of the graph's weights; they outlive the program.
        buffers: For each input of the graph the array that it always is, or None for what each step brings.

    Raises:
        UnknownGraph: the graph has what no kernel computes.
        ToolchainError: as `libraries.load`.
    """

    def __init__(self, graph: ReadGraph, weights: Mapping[str, Array], buffers: Sequence[Array | None]) -> None:
        self._renew_lock()
        renew_in_children(self, Program._renew_lock)
        self.inputs = graph.inputs
        self._inputs = [value for value, buffer in zip(graph.inputs, buffers, strict=True) if buffer is None]
        self.outputs = graph.outputs
        self._alive: list[Any] = [weights, buffers]
        for index, value in enumerate(self._inputs):
            value.at = Word(0, 1, f"input {index}")
        for value, buffer in zip(graph.inputs, buffers, strict=True):
            if buffer is not None:
                value.at = Word(_address(buffer))
        self._bind(graph, weights)
        self.slots = place(graph)
        self._layers = layers = Layers.of(graph.operations)
        self.operations = graph.operations
        self.calls: list[KernelCall] = []
        self.of_call: list[int] = []
        """The number of the operation of each call."""
        for index, made in enumerate(calls_of_all(graph.operations, layers)):
            self.calls += made
            self.of_call += [index] * len(made)
        runner, *_ = kernels = _kernels(layers, self.calls)
        load(kernels)
        functions = ctypes.CDLL(None)
        addresses = {kernel: ctypes.cast(functions[kernel.name], ctypes.c_void_p).value for kernel in kernels}
        self._run = functions[runner.name]
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], ctypes.c_void_p
        self._pack(addresses)

    def _renew_lock(self) -> None:
        self._lock = Lock()

    def _bind(self, graph: ReadGraph, weights: Mapping[str, Array]) -> None:
        """Gives constants and weights their addresses."""
        for op in graph.operations:
            for operand in op.operands:
                value = operand.memory
                if value.data is not None and not value.at.constant:
                    data = np.ascontiguousarray(value.data)
                    self._alive.append(data)
                    value.at = Word(_address(data))
                elif value.weight:
                    array = weights[value.weight]
                    expected = tuple(word.constant for word in value.shape)
                    if array.shape != expected or not array.flags.c_contiguous:
                        raise ContractError(f"{value.weight}: expected the shape {expected}, got {array.shape}")
                    value.at = Word(_address(array))

    def _pack(self, addresses: Mapping[Kernel, int | None]) -> None:
        """Lays the numbers of all calls out, one after the other."""
        words: list[Word] = []
        starts: list[int] = []
        self._workers_at: list[int] = []
        for call in self.calls:
            members = len(words)
            words += call.members
            starts.append(len(words))
            words += [Word(8 * members, 1, _WORDS) if word is MEMBERS else word for word in call.words]
            self._workers_at.append(len(words))
            words += [Word(0)] * WORKERS.size
        self._words = np.array([word.constant for word in words], np.int64)
        varying = [index for index, word in enumerate(words) if word.coefficient]
        names = list(dict.fromkeys(words[index].symbol for index in varying))
        names += [name for slot in self.slots if (name := slot.size.symbol) and name not in names]
        self._symbols = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._varying = np.array(varying, np.int64)
        self._constants = self._words[self._varying]
        self._coefficients = np.array([words[index].coefficient for index in varying], np.int64)
        self._symbol_of = np.array([self._symbols[words[index].symbol] for index in varying], np.int64)
        self._functions = np.array([addresses[call.kernel] for call in self.calls], np.int64)
        self._operands = _address(self._words) + 8 * np.array(starts, np.int64)
        self._stopped = np.zeros(1, np.int64)
        functions, operands, stopped = map(_address, (self._functions, self._operands, self._stopped))
        numbers = PROGRAM.flat(functions=functions, operands=operands, count=len(self.calls), stopped=stopped, begins=0)
        self._call = np.array(numbers, np.int64)
        self._arena = np.empty(0, np.uint8)

    def run(
        self, inputs: Sequence[Array], profile: StepProfile | None = None, watch: Watch | None = None
    ) -> list[Array]:
        """The outputs of a step, in fresh memory.

        Args:
            inputs: What each step brings, in the order of the graph's inputs.
            profile: One of `new_profile`, which notes the times of this run.
            watch: Called with each operation's number, itself and its results, which are memory of the program that
                later operations write to: the operations run one by one then. No profile goes with it.

        Raises:
            ContractError: a kernel refuses its operands; the message names the operation.
        """
        with self._lock:
            began = perf_counter_ns()
            self._call[PROGRAM.index("begins")] = 0 if profile is None else _address(profile.begins)
            sizes = self._sizes(inputs)
            outputs = [np.empty([_at(word, sizes) for word in value.shape], _numpy(value)) for value in self.outputs]
            sizes |= {f"input {i}": _address(each) for i, each in enumerate(inputs)}
            sizes |= {f"output {i}": _address(each) for i, each in enumerate(outputs)}
            sizes |= self._slots_in_arena(sizes)
            sizes[_WORDS] = _address(self._words)
            values = np.array([sizes[name] for name in self._symbols], np.int64)
            self._words[self._varying] = self._constants + self._coefficients * values[self._symbol_of]
            threads = np.frombuffer(workers(), np.int64)
            at = np.array(self._workers_at, np.int64)
            for index in range(WORKERS.size):
                self._words[at + index] = threads[index]
            if watch is None:
                self._run_calls()
            else:
                self._run_watched(watch, sizes)
            if profile is not None:
                profile.add(perf_counter_ns() - began, sizes)
        return outputs

    def _run_watched(self, watch: Watch, sizes: Mapping[str, int]) -> None:
        """Runs the calls of one operation after the other, and shows what each gives."""
        whole = self._call.copy()
        try:
            for index, op in enumerate(self.operations):
                first, end = bisect_left(self.of_call, index), bisect_right(self.of_call, index)
                for name in ("functions", "operands"):
                    self._call[PROGRAM.index(name)] = whole[PROGRAM.index(name)] + 8 * first
                self._call[PROGRAM.index("count")] = end - first
                self._run_calls(first)
                watch(index, op, [_array_at(value, sizes) for value in op.results])
        finally:
            self._call[:] = whole

    def _run_calls(self, first: int = 0) -> None:
        """Makes the calls that `_call` names, of which `first` is the first one."""
        message = self._run(_address(self._call))
        if message:
            op = self.operations[self.of_call[first + int(self._stopped[0])]]
            raise ContractError(f"{op.name}: {text_at(message)}")

    def wait(self) -> None:
        """Returns when the run in progress, if there is one, has ended."""
        with self._lock:
            pass

    def new_profile(self) -> StepProfile:
        """One that `run` takes."""
        return StepProfile(self.operations, self.of_call, self._layers.dtype)

    def _sizes(self, inputs: Sequence[Array]) -> dict[str, int]:
        """The sizes of a step by their symbols.

        Raises:
            ContractError: an input has another dtype or shape than the graph's.
        """
        sizes: dict[str, int] = {}
        for index, (value, array) in enumerate(zip(self._inputs, inputs, strict=True)):
            if array.dtype != _numpy(value) or array.ndim != len(value.shape) or not array.flags.c_contiguous:
                raise ContractError(f"input {index}: got {array.dtype} of shape {array.shape}")
            for word, size in zip(value.shape, array.shape, strict=True):
                if (sizes.setdefault(word.symbol, size) if word.coefficient else word.constant) != size:
                    raise ContractError(f"input {index}: got shape {array.shape}")
        return sizes

    def _slots_in_arena(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The addresses of the slots; the arena grows where it is too small."""
        ends, end = {}, 0
        for slot in self.slots:
            ends[slot.name] = end
            end += -(-_at(slot.size, sizes) // _LINE) * _LINE
        if self._arena.size < end + _LINE:
            self._arena = np.empty(end + _LINE, np.uint8)
        start = -(-_address(self._arena) // _LINE) * _LINE
        return {name: start + offset for name, offset in ends.items()}


def graph_kernels(graph: ReadGraph) -> list[Kernel]:
    """The kernels that the program of a graph calls.

    Raises:
        UnknownGraph: as `Program`.
    """
    layers = Layers.of(graph.operations)
    return _kernels(layers, list(chain.from_iterable(calls_of_all(graph.operations, layers))))


def _kernels(layers: Layers, calls: Sequence[KernelCall]) -> list[Kernel]:
    """The kernel that runs a program, and those that it calls."""
    return list(dict.fromkeys([layers.kernel("program"), *(call.kernel for call in calls)]))


def place(graph: ReadGraph) -> list[Slot]:
    """Gives each value that an operation makes a slot of the arena, for as long as an operation reads it.

    A slot takes values whose sizes grow with one symbol, so that no order of sizes has to be known.
    """
    last: dict[int, int] = {}
    for index, op in enumerate(graph.operations):
        for value in (*op.operands, *op.results):
            last[id(value.memory)] = index
    for number, value in enumerate(graph.outputs):
        if value.memory.data is not None or value.memory.weight or value.memory.at.coefficient:
            raise UnknownGraph("an output that no operation makes")
        value.memory.at = Word(0, 1, f"output {number}")
    slots: list[Slot] = []
    for index, op in enumerate(graph.operations):
        for value in op.results:
            if value.source is not None or value.at.coefficient:
                continue
            size = value.bytes
            free = [slot for slot in slots if slot.free_after < index and slot.holds(size)]
            # The one that grows least.
            slot = min(free, key=lambda each: abs(_weight(each.size) - _weight(size)), default=None)
            if slot is None:
                slot = Slot(f"slot {len(slots)}")
                slots.append(slot)
            slot.take(size)
            slot.free_after = last[id(value)]
            value.at = Word(0, 1, slot.name)
    return slots


def _weight(size: Word) -> int:
    return size.coefficient or size.constant


def _at(word: Word, sizes: Mapping[str, int]) -> int:
    return word.constant + (word.coefficient * sizes[word.symbol] if word.coefficient else 0)


def _array_at(value: Value, sizes: Mapping[str, int]) -> Array:
    """The array that a value is in this run, in the program's memory."""
    shape, dtype = [_at(word, sizes) for word in value.shape], _numpy(value)
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(_at(value.address, sizes))
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def _numpy(value: Value) -> np.dtype[Any]:
    return np.dtype(value.dtype.name)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0] if array.size else 0
    return address
