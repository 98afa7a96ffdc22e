"""Graphs of the op tests, each run as the program that a step on a CPU is, or by MAX.

A test module adds its graphs when it is collected, and runs them by their names, which no other module uses:

    op_graphs.add("sums_float32", ops.add_scaled, x, y)
    (total,) = op_graphs.run("sums_float32", a, b)

MAX compiles its graphs in one go, for a compile takes 15 s before its first kernel: those that no program knows, and
those of operands whose sizes only the registered op compares. A run of one file compiles that file's graphs alone.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from max.driver import get_virtual_cpu_target
from max.engine import Model
from max.graph import BufferType, Graph, Module, TensorType

from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.graphs import ops
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.graph_reading import KernelsInLibraries, graph_building, read_graph
from paged_kv.runtime.program import Program
from paged_kv.runtime.session import default_runtime


class _Definition(NamedTuple):
    make: Callable[..., Any]
    types: tuple[TensorType | BufferType, ...]

    def build(self, module: Module, title: str, **kernels: Any) -> None:
        with Graph(title, input_types=self.types, module=module, **kernels) as graph:
            given = [
                each.buffer if isinstance(kind, BufferType) else each.tensor
                for each, kind in zip(graph.inputs, self.types, strict=True)
            ]
            outputs = self.make(*given)
            graph.output(*(() if outputs is None else outputs if isinstance(outputs, (tuple, list)) else (outputs,)))

    def sizes(self, arrays: tuple[np.ndarray, ...]) -> dict[str, int]:
        """Those of all symbols but the first, which stays one, as the number of a step's tokens does."""
        found: dict[str, int] = {}
        for kind, array in zip(self.types, arrays, strict=True):
            found |= {str(dim): size for dim, size in zip(kind.shape, array.shape, strict=True)}
        first = str(self.types[0].shape[0])
        return {name: size for name, size in found.items() if not name.isdigit() and name != first}


_programs: dict[str, _Definition] = {}
_of_max: dict[str, _Definition] = {}


def add(title: str, make: Callable[..., Any], *types: TensorType | BufferType, by_max: bool = False) -> None:
    """Registers a graph whose outputs are what `make` returns for its inputs: a tensor, several, or None."""
    assert title not in _programs.keys() | _of_max.keys(), title
    (_of_max if by_max else _programs)[title] = _Definition(make, types)


def run(title: str, *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of a graph; buffers among `arrays` are written in place."""
    if title not in _programs:
        return [to_numpy(output).copy() for output in _models()[title].execute(*map(to_buffer, arrays))]
    sizes = _programs[title].sizes(arrays)
    return _program(title, tuple(sizes.items())).run(arrays)


def paged_cache(table: Any, blocks: Sequence[Any], layout: str, kv_format: str | None = None) -> ops.PagedCache:
    """The cache of a graph's buffers: one or two, of codes where a format is named, or two and the view of strides."""
    if kv_format:
        return ops.PagedCache.of(*blocks, table, kv_format=kv_format)
    if layout == "STRIDED":
        k, v, view = blocks
        return ops.PagedCache(k, v, table, layout, view)
    return ops.PagedCache(blocks[0], blocks[-1], table, layout)


@cache
def _program(title: str, sizes: tuple[tuple[str, int], ...]) -> Program:
    definition = _programs[title]
    none = [None] * len(definition.types)
    with graph_building():
        module = Module()
        definition.build(module, title, kernel_library=KernelsInLibraries())
        graph = read_graph(module, none, dict(sizes))
    return Program(graph, {}, none)


@cache
def _models() -> Mapping[str, Model]:
    module = Module()
    for title, definition in _of_max.items():
        definition.build(module, title, custom_extensions=[ops.kernels()])
    session = default_runtime().session
    with one_process_at_a_time("op_graphs"):
        return session.load_all(module, custom_extensions=[ops.kernels()])


@contextmanager
def one_process_at_a_time(name: str) -> Iterator[None]:
    """The first of several workers that need one compile does it; the others then find it in the cache."""
    path = cache_folder() / f"tests-{name}-{get_virtual_cpu_target()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or the process ends
        yield
