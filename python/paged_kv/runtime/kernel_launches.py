"""Kernels that a GPU was given: the driver's own list of launches, so what ran and not what was meant to.

    with launched() as launches:
        wrapper.run(q, cache)
    [launch.kernel for launch in launches]      # ["gpu/hopper", "gpu/combine"]; over 32 rows: gpu/schedule first

The device is not waited for. A graph that comes out of a cache launches like one that was just compiled; the replay of
a captured graph launches none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from max.driver import LaunchTraceEntry, launch_trace

_FILES = {
    "attention_gpu_hopper": "gpu/hopper",
    "attention_gpu_generi": "gpu/generic",
    "attention_gpu_latent": "gpu/latent",
    "attention_gpu_schedu": "gpu/schedule",
    "attention_gpu_combin": "gpu/combine",
    "attention_merge_state": "merge_states",
}
"""A compiled kernel is named after the file that it is in; the compiler shortens the name."""

ATTENTION = ("gpu/hopper", "gpu/generic", "gpu/latent")
"""The kernels of which a call of attention gets one."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    """Its place in `mojo_ops/attention`, as `paged-kv doctor --explain` names it; another kernel's own name."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """Dynamic shared memory, in bytes."""
    stream: int
    """Equal numbers are one stream."""

    @classmethod
    def of(cls, entry: LaunchTraceEntry) -> Launch:
        return cls(
            kernel_label(entry.name),
            (entry.grid_x, entry.grid_y, entry.grid_z),
            (entry.block_x, entry.block_y, entry.block_z),
            entry.shared_mem_bytes,
            entry.stream_index,
        )


def kernel_label(name: str) -> str:
    """Return what a compiled kernel is: its place in `mojo_ops/attention`, or its own name where it is none of
    attention.
    """
    kernels = [kernel for part, kernel in _FILES.items() if f"mojo_ops_{part}" in name]
    return kernels[0] if kernels else name


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """The kernels that are launched inside, by any thread, in their order; the list is filled at the end.

    On NVIDIA and AMD; elsewhere it stays empty. One at a time in a process: it is the driver's only recording.
    """
    launches: list[Launch] = []
    with launch_trace() as entries:
        yield launches
    kernels = [entry for entry in entries if entry.kind == LaunchTraceEntry.OperationKind.KERNEL_LAUNCH]
    launches += map(Launch.of, kernels)
