"""The interface of every measured system, ours and the others alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.problems import Array, Problem, bits


class Peer(ABC):
    """One system on one case: `available`, then `prepare` once, then `run` any number of times.

    Memory that is read in a run comes from NumPy, which requests huge pages: all systems read memory of one kind.
    """

    name: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs, by the names that they are imported by."""

    def available(self, case: Case) -> str | None:  # noqa: ARG002
        """The reason not to run this case here, or None.

        Raises:
            ImportError: a package is not installed.
        """
        for package in self.packages:
            import_module(package)
        return None

    @abstractmethod
    def prepare(self, problem: Any, copies: int) -> None:
        """Builds its own storage, `copies` times, so that run `i` uses number `i % copies`."""

    @abstractmethod
    def run(self, i: int) -> None:
        """One run, and nothing besides."""

    @abstractmethod
    def output(self) -> Array:
        """Return the output of the latest run, as `Problem.error` takes it, in any float dtype of NumPy or
        `ml_dtypes`.
        """

    def error(self, problem: Problem) -> float:
        """Return the error of the latest run."""
        return problem.error(self.output())


def torch_view(array: Array) -> Any:
    """A torch tensor over an array's memory."""
    import torch

    if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float8_e4m3fn"):  # ml_dtypes
        raw = {1: np.uint8, 2: np.int16}[array.itemsize]
        return torch.from_numpy(array.view(raw)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def repeat(array: Array, copies: int) -> Array:
    """`[copies, ...]`: the same contents that many times, in memory of their own."""
    out = np.empty((copies, *array.shape), array.dtype)
    bits(out)[:] = bits(array)
    return out


def batched(problem: Any) -> tuple[Array, Array]:
    """K and V of equally long requests, contiguous by head: `[B, Hk, L, D]` each."""
    case = problem.case
    shape = (len(case.lengths), case.lengths[0], case.kv_heads, case.head_dim)
    k, v = (
        np.ascontiguousarray(bits(array).reshape(shape).swapaxes(1, 2)).view(array.dtype)
        for array in (problem.k, problem.v)
    )
    return k, v


def unequal(case: Case) -> str | None:
    """The reason why a system that takes one length for all requests cannot run the case, or None."""
    lengths = getattr(case, "lengths", ())
    return None if len(set(lengths)) == 1 else "takes one length for all requests"
