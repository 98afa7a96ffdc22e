"""Graphs of the op tests, compiled in one go: a compile takes 15 s before its first kernel.

A test module adds its graphs when it is collected:

    @op_graphs.add
    def build(module): ...

and finds them in `op_graphs.models()`, by graph name. So a run of one file compiles that file's graphs alone.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from max.driver import get_virtual_cpu_target
from max.engine import Model
from max.graph import Graph, Module, TensorType

from paged_kv.graphs import ops
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.session import default_runtime

Build = Callable[[Module], None]

_builders: list[Build] = []


def add(build: Build) -> Build:
    """Registers a function that adds graphs to a module; their names differ from those of other test modules."""
    _builders.append(build)
    return build


def graph_of(module: Module, title: str, make: Callable[..., object], *types: TensorType) -> None:
    """Adds a graph whose outputs are what `make` returns for its inputs: a tensor, or a tuple of them."""
    with Graph(title, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
        outputs = make(*(value.tensor for value in graph.inputs))
        graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))


@cache
def models() -> Mapping[str, Model]:
    """All graphs of the test modules that were collected."""
    module = Module()
    for build in _builders:
        build(module)
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
