"""The tests on kernels compiled ahead, with a compiler that refuses: `pytest --compiled-kernels DIR tests/api`.

A process that a test starts (an example, a graph) compiles what it lacks; this one compiles a model's step at most.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from max.engine import CompiledModel, InferenceSession
from max.graph import Module

from paged_kv.runtime import artefacts, installed
from paged_kv.runtime.graph_bundle import API_VARIANTS
from support import harness

_NAMES = frozenset(variant.name for variant in API_VARIANTS)
_compile_graphs = artefacts.compile_graphs
_cache: tempfile.TemporaryDirectory[str] | None = None


def install(folder: Path, *, in_worker: bool) -> None:
    """Makes this process take the API's kernels from a folder of `python -m paged_kv.build_kernels` alone.

    To be called before test modules are imported, because they read the dtypes.

    Args:
        folder: Has a folder for each CPU target.
        in_worker: Whether the process that started this one has called `install`: its empty cache folder serves both.
    """
    global _cache
    if not in_worker:
        _cache = tempfile.TemporaryDirectory(prefix="paged-kv-tests-")
        os.environ["XDG_CACHE_HOME"] = _cache.name
    roots = [folder.resolve(strict=True)]
    installed.kernel_roots = lambda: roots
    artefacts.compile_graphs = _refuse_kernels
    pairs = {(variant.dtype.name, variant.kv_dtype.name) for variant in API_VARIANTS}
    harness.PAIRS = tuple(pair for pair in harness.PAIRS if pair in pairs)


def _refuse_kernels(
    session: InferenceSession, names: Sequence[str], build: Callable[[Module, Sequence[str]], None]
) -> CompiledModel:
    if isinstance(session, InferenceSession) and not _NAMES.isdisjoint(names):  # a stand-in compiles nothing
        raise AssertionError(f"{', '.join(names)} would be compiled")
    return _compile_graphs(session, names, build)
