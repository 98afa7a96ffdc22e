"""The bandwidth of the machine's memory, measured on the threads that MAX runs kernels on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model, read
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, Type, ops

from paged_kv.bench import bandwidth_op
from paged_kv.bench.case_kinds import MIN_COPIES, MIN_ROTATED
from paged_kv.bench.problems import Array
from paged_kv.runtime.artefacts import export
from paged_kv.runtime.compile_key import hash_of, toolchain
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.store import user_store

LINE = 64
READ_BYTES = 2**27
"""In one run: enough that starting the threads does not count."""
STREAMS = (1, 4, 8)
LOOPS = [(1, 2**21, 8192), *itertools.product((4, 8), (2**16, 2**21), (1024, 2048))]
"""Loops of `bench_read`: streams a core, bytes between them, bytes ahead of use. Wider searches found none faster."""
CHUNKS = (0, 2**18, 2**20)
"""Tasks of `bench_copy`: bytes a task, 0 for one task a core."""


class Bandwidth:
    """The loops, compiled. Each `..._run` settles on the fastest loop, and returns a run of it for `take_turns`."""

    def __init__(self) -> None:
        apply_cpu_target()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._models = _load(InferenceSession(devices=[CPU()]), self._cores)
        self.chosen: dict[str, Any] = {}
        """By "read" and "copy", the fastest of `LOOPS` and of `CHUNKS`."""

    def sum(self, data: Buffer, loop: tuple[int, int, int]) -> int:
        """Reads all of `data`, whole lines of 64 bytes; the sum of its bytes modulo 256."""
        streams, distance, ahead = loop
        sums = execute(self._models[f"read_{streams}"].execute, data, _number(distance), _number(ahead))[0]
        return int(sums.to_numpy().sum(dtype=np.uint8))

    def copy(self, into: Buffer, source: Buffer, chunk: int) -> None:
        """Copies bytes, `chunk` a task."""
        execute(self._models["copy"].execute, into, source, _number(chunk))

    def read_run(self, memory: Array) -> tuple[Callable[[int], object], int]:
        """A run that reads the next piece of `memory` each time, and how many bytes a piece has.

        Run `i` is far from where a system of 20 copies is in its own run `i`.
        """
        every = memory.reshape(-1).view(np.uint8)
        size = min(READ_BYTES, every.size // LINE * LINE)
        parts = [every[at : at + size] for at in range(0, every.size - size + 1, size)]
        pieces = [as_bytes(part) for part in parts]
        half = len(pieces) // 2

        def run(i: int, loop: tuple[int, int, int]) -> None:
            self.sum(pieces[(i + half) % len(pieces)], loop)

        expected = int(parts[0].sum(dtype=np.uint8))
        for loop in LOOPS:
            if (total := self.sum(pieces[0], loop)) != expected:
                raise RuntimeError(f"read loop {loop}: expected the sum {expected} of all bytes, got {total}")
        self.chosen["read"] = loop = fastest(run, LOOPS)
        return lambda i: run(i, loop), size

    def copy_run(self, size: int) -> Callable[[int], object]:
        """Run `i` copies `size` bytes from one place to another."""
        copies = max(MIN_COPIES, int(MIN_ROTATED / 4) // size)
        both = np.ones((2, copies, size), np.uint8)
        pairs = [(as_bytes(into), as_bytes(source)) for into, source in zip(*both, strict=True)]

        def run(i: int, chunk: int) -> None:
            self.copy(*pairs[i % copies], chunk)

        self.chosen["copy"] = chunk = fastest(run, CHUNKS)
        return lambda i: run(i, chunk)


def fastest(run: Callable[[int, Any], object], choices: Sequence[Any], repeats: int = 5) -> Any:
    """The choice with which `run(i, choice)` takes least (medians; the choices take turns)."""
    times = np.zeros((repeats, len(choices)))
    turn = itertools.count()
    for row in times:
        for at, choice in enumerate(choices):
            number = next(turn)
            start = time.perf_counter()
            run(number, choice)
            row[at] = time.perf_counter() - start
    return choices[int(np.median(times, axis=0).argmin())]


def as_bytes(array: Array) -> Buffer:
    """The memory of a C-contiguous array as `[n]` uint8."""
    return Buffer.from_dlpack(array.reshape(-1).view(np.uint8))


def _number(value: int) -> Buffer:
    return Buffer.from_dlpack(np.array([value], np.int64))


def _load(session: InferenceSession, cores: int) -> dict[str, Model]:
    """The compiled loops, kept on disk as the package's own graphs are."""
    folder = Path(bandwidth_op.__path__[0])
    facts = [f"bandwidth {cores} {toolchain()} {STREAMS}".encode(), (folder / "ops.mojo").read_bytes()]
    store, digest = user_store(), hash_of(facts)
    for artefact in store.find([digest]):
        try:
            return session.init_all(read(BytesIO(artefact.content)))
        except (RuntimeError, ValueError, OSError):
            store.remove(artefact.path)  # whole, but nothing that MAX reads
    module, cpu = Module(), DeviceRef.CPU()
    data, number = TensorType(DType.uint8, ["bytes"], cpu), TensorType(DType.int64, [1], cpu)
    sums = TensorType(DType.uint8, [cores], cpu)
    for streams in STREAMS:
        name = f"read_{streams}"
        with Graph(name, input_types=[data, number, number], custom_extensions=[folder], module=module) as graph:
            values = [value.tensor for value in graph.inputs]
            graph.output(
                ops.custom("bench_read", cpu, values, out_types=[sums], parameters={"streams": streams})[0].tensor
            )
    types: list[Type[Any]] = [BufferType(DType.uint8, ["bytes"], cpu), data, number]
    with Graph("copy", input_types=types, custom_extensions=[folder], module=module) as graph:
        ops.inplace_custom("bench_copy", cpu, list(graph.inputs))
        graph.output()
    compiled = session.compile(module, custom_extensions=[folder])
    store.keep([digest], lambda path: export(compiled, path))
    return session.init_all(compiled)
