"""The CPU's kernels in shared libraries, which a call enters at once and on threads that the process has already.

MAX runs a graph on a pool of threads of its own: a call changes threads twice, and beside another pool, torch's, both
spin on the same cores after their work. A library of `native.mojo` has the same kernels for one pair of dtypes and runs
them in a parallel region of OpenMP, by the `GOMP_parallel` of whatever the process has loaded: torch's libgomp, or an
OpenMP of LLVM's or Intel's that was loaded before. It is built once, in some 10 s, which takes a C compiler that links,
and kept in the cache folder as compiled graphs are (`store.py`, `compile_key.py`).

In a process that was forked off one with threads, OpenMP's are missing, and to wait for them would never end: there
`may_use_threads` is false, and calls are given one thread.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from threading import Lock

# Its libraries are those that a kernel library is linked to, and are found by their names once they are loaded.
import max.driver  # noqa: F401
from mojo.run import subprocess_run_mojo

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cache_folder import cache_path
from paged_kv.runtime.compile_key import CompileKey, Sources, digests_of
from paged_kv.runtime.cpu_target import CpuInfo, apply_cpu_target, check_cpu_runs
from paged_kv.runtime.kernel_library import kernel_library
from paged_kv.runtime.session import announce
from paged_kv.runtime.store import Store

_PROGRAM = "native.mojo"
_SECONDS = 900
"""After which a build has hung: one takes 10 s on an idle core."""
_TASKS = Path("/proc/self/task")


class NativeLibrary:
    """The functions of one library; each takes the bytes of its struct (`native.mojo`).

    They raise a ContractError with what the kernel refuses, and where the memory of a result has not the bytes that its
    dtype and shape take. Python's other threads run meanwhile.

    Args:
        path: The library's file.

    Raises:
        OSError: it cannot be loaded, or the process has no OpenMP.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._attend, self._append, self._gather, self._linear = (
            _function(library, name) for name in ("attend", "append", "gather", "linear")
        )

    def attend(self, call: bytes) -> None:
        """`AttentionCall`."""
        _check(self._attend(call))

    def append(self, call: bytes) -> None:
        """`AppendCall`."""
        _check(self._append(call))

    def gather(self, call: bytes) -> None:
        """`GatherCall`."""
        _check(self._gather(call))

    def linear(self, call: bytes) -> None:
        """`LinearCall`."""
        _check(self._linear(call))


def native_library(rows: str, cache: str) -> NativeLibrary | None:
    """The library of queries and rows of one dtype over a cache whose memory is of another; loaded, or built now.

    None where that cannot be done, which a RuntimeWarning says once with the reason; the caller goes by MAX then.

    Args:
        rows: "float32", "bfloat16" or "float16"; "uint8" for rows that are copied.
        cache: The same, a float8, or "int8" or "uint8" for codes.

    Raises:
        ToolchainError: the Mojo sources do not compile; or as `Store`.
    """
    pair = rows, cache
    if pair not in _LIBRARIES:
        with _STATE.loading:
            if pair not in _LIBRARIES:
                try:
                    _LIBRARIES[pair] = _load(rows, cache)
                except OSError as error:
                    _LIBRARIES[pair] = None
                    warnings.warn(
                        f"no library of kernels for {rows} over {cache} ({error}): calls run on MAX's threads",
                        RuntimeWarning,
                        1,
                    )
    return _LIBRARIES[pair]


def may_use_threads() -> bool:
    """Whether a call may run on more than the thread that makes it."""
    return not _STATE.lost_threads


class _State:
    """What a fork changes."""

    def __init__(self) -> None:
        self.lost_threads = self._has_threads = False
        self.loading = Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        try:
            self._has_threads = len(os.listdir(_TASKS)) > 1
        except OSError:  # where threads are not listed: there may be some
            self._has_threads = True

    def _in_child(self) -> None:
        self.lost_threads |= self._has_threads
        self.loading = Lock()  # a thread that the child lacks may hold the other one


_STATE = _State()
_LIBRARIES: dict[tuple[str, str], NativeLibrary | None] = {}
_FREE = ctypes.CDLL(None).free
_FREE.argtypes, _FREE.restype = [ctypes.c_void_p], None


def _function(library: ctypes.CDLL, name: str) -> Callable[[bytes], int | None]:
    function = getattr(library, f"paged_kv_{name}")
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_void_p
    return function


def _check(message: int | None) -> None:
    if message:
        try:
            text = ctypes.string_at(message).decode(errors="replace")
        finally:
            _FREE(message)
        raise ContractError(text)


def _load(rows: str, cache: str) -> NativeLibrary:
    """The library, from the cache folder or built.

    Raises:
        OSError: it cannot be built, kept or loaded here.
        ToolchainError: as `native_library`.
    """
    target = apply_cpu_target()
    check_cpu_runs(target, CpuInfo.read())
    key = {"": CompileKey(f"native library, {rows} over {cache}", (f"runtime/{_PROGRAM}",))}
    (digest,) = digests_of(key, Sources.installed()).values()
    store = Store(cache_path() / "native", "{}.library")

    def build(path: Path) -> None:
        announce(f"paged-kv: building a library of kernels, {rows} over {cache}: about 10 s, once on this machine")
        _build(path, rows, cache, target)
        if list(digests_of(key, Sources.installed()).values()) != [digest]:
            raise ToolchainError("a source was edited while it was compiled: try again")

    found = store.find([digest])
    if not found:
        reason = store.keep([digest], build)
        found = store.find([digest])
        if not found:
            raise OSError(reason or f"{store.path} was emptied meanwhile")
    # The loader reads no file with a seal.
    path = Store(store.path / "loaded").plain(found[0], f"{digest}.so")
    if path is None:
        raise OSError(f"{store.path} cannot be written")
    return NativeLibrary(path)


def _build(path: Path, rows: str, cache: str, target: str | None) -> None:
    """Compiles the library to a file.

    Raises:
        OSError: there is no linker, or the file cannot be written.
        ToolchainError: the sources do not compile.
    """
    program = resources.files("paged_kv.runtime") / _PROGRAM
    defined = [option for define in ("PAGED_KV_OPENMP", f"ROWS={rows}", f"CACHE={cache}") for option in ("-D", define)]
    command = ["build", "--emit", "shared-lib", "-O3", *defined, *([f"--target-cpu={target}"] if target else [])]
    command += ["-I", str(kernel_library(kernels()).parent), str(program), "-o", str(path)]
    try:
        done = subprocess_run_mojo(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise OSError(str(error)) from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error:" in line]
        if any(".mojo:" in line for line in said):
            raise ToolchainError(f"{program} does not compile: {'; '.join(said)}")
        raise OSError("; ".join(line.partition("error: ")[2] for line in said) or f"mojo ended with {done.returncode}")
