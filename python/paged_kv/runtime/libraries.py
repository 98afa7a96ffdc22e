"""The CPU's kernels in shared libraries: compiled once for a CPU, called from Python, and by the graphs of MAX.

A library holds the kernels of one set of dtypes (`Library`). It is built from the Mojo sources by the compiler and the
linker that MAX brings, and kept in the cache folder under the rules of compiled graphs (`store.py`, `compile_key.py`).
Some 10 s of a build go to what every program has; so those that are missing are built in one file together. Loaded,
each of its functions is known in the process by its kernel's name (`Kernel.name`): there an op of a graph finds it
(`mojo_ops/isa/library_call.mojo`). The caller of a function says which threads it may use (`thread_pool.py`).
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import files
from importlib.resources import files as resources
from pathlib import Path
from threading import Lock
from typing import Any

# Its libraries are those that kernels need, and are found by their names once they are loaded.
from max.driver import get_virtual_cpu_target

from paged_kv.call_layouts import CALLS
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.graphs.ops import kernels
from paged_kv.kv_formats import FORMATS
from paged_kv.options import FLOAT8_DTYPES, Q_DTYPES
from paged_kv.runtime.announce import announce
from paged_kv.runtime.artefact_paths import origin, places
from paged_kv.runtime.cache_folder import cache_path
from paged_kv.runtime.compile_key import LibraryKey, Sources, digests_of
from paged_kv.runtime.cpu_target import CpuInfo, apply_cpu_target, check_cpu_runs
from paged_kv.runtime.kernel_library import is_packed, kernel_library
from paged_kv.runtime.store import Artefact, Store

Function = Callable[[bytes], None]
"""A kernel: it takes the bytes of its struct (`call_layouts.CALLS`)."""

PROGRAM = "library.mojo"
COPIED = {1: "uint8", 2: "bfloat16", 4: "float32"}
"""The dtype in whose name elements of so many bytes are copied."""
_SECONDS = 900
"""After which a build has hung: one takes 10 s on an idle core."""
_ATTENTION = {"attention", "attention_rotated", "masked_attention", "masked_attention_rotated", "latent"}
_WITH_PAGES = ("attention", "append", "gather", "linear")
_QUANTISED = ("quantised_linear", "quantised_experts", "quantised_rows")
"""The products by weights in blocks of some encodings, and what unpacks their rows."""
ALL_ENCODINGS = (1 << len(ENCODINGS)) - 1
_RECURRENT = ("delta_rule", "selective_scan")
_LAYERS = (
    *("program", "take_rows", "take_columns", "rms_norm", "rotate", "hadamard", "rotary_tables", "add_scaled"),
    *("gate_units", "convert", "step_rows", "ragged_rows", "unary", "binary"),
    *("mean", "choose_experts", "gate_halves", "weighted_sum"),
)
"""The small ops of a step, of one dtype, and what runs its program."""
_RECURRENT_LAYERS = ("causal_conv1d", "layer_recurrence", "gated_norm")
"""The ops of recurrent layers, of one dtype of activations."""
_TOGETHER = (_QUANTISED, _RECURRENT, _LAYERS, _RECURRENT_LAYERS)
"""Kernels that lie in one library."""


@dataclass(frozen=True)
class Kernel:
    """One function.

    Args:
        kind: Its name in `library.mojo`.
        dtypes: The dtypes of q, the cache and o (attention); of rows and the cache (append, gather); of x and the
            weights (linear, experts, adapter_linear); of the states (merge); of x (quantised).
        mask: Bits of the encodings that quantised weights may have.
    """

    kind: str
    dtypes: tuple[str, ...]
    mask: int = 0

    @property
    def name(self) -> str:
        """The symbol of its function in the process."""
        return "_".join(("paged_kv", self.kind, *self.dtypes, *([str(self.mask)] if self.mask else [])))

    @property
    def library(self) -> Library:
        """The library that contains the kernel. Kernels over one cache share a library; others have their own."""
        rows, cache, o = (*self.dtypes, *[self.dtypes[0]] * 2)[:3]
        kinds = tuple(kind for kind in _WITH_PAGES if _has(kind, rows, cache)) if o == rows else ()
        kinds = next((each for each in _TOGETHER if self.kind in each), kinds)
        return Library(kinds if self.kind in kinds else (self.kind,), (rows, cache, o), self.mask)


def _has(kind: str, rows: str, cache: str) -> bool:
    """Return whether a kernel is in the library of a cache's pages."""
    if kind == "linear":
        return rows == cache and rows in Q_DTYPES
    if kind == "attention":
        return rows in Q_DTYPES
    return rows == cache in COPIED.values() or cache in FORMATS


@dataclass(frozen=True)
class Library:
    """Kernels that are compiled together, of three dtypes: q or the rows, the cache or the weights, and o."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    mask: int = 0

    def kernel(self, kind: str) -> Kernel:
        """Its kernel of a kind."""
        counts = {"merge": 1, "append": 2, "gather": 2, "linear": 2, "experts": 2, "adapter_linear": 2}
        counts |= dict.fromkeys((*_QUANTISED, *_RECURRENT, *_LAYERS, *_RECURRENT_LAYERS), 1)
        return Kernel(kind, self.dtypes[: counts.get(kind, 3)], self.mask)

    def kernels(self) -> list[Kernel]:
        """All of them."""
        return [self.kernel(kind) for kind in self.kinds]

    @property
    def file(self) -> str:
        """Its name as a file."""
        if self.kinds == _RECURRENT:
            return "recurrent"
        if self.kinds == _QUANTISED:
            return "_".join(("quantised", self.dtypes[0], *([] if self.mask == ALL_ENCODINGS else [str(self.mask)])))
        if self.kinds in (_LAYERS, _RECURRENT_LAYERS):
            return ("layers_" if self.kinds == _LAYERS else "recurrent_layers_") + self.dtypes[0]
        if len(self.kinds) > 1:
            return "_".join(("pages", *self.dtypes[:2]))
        return self.kernel(self.kinds[0]).name.removeprefix("paged_kv_")

    @property
    def bundle(self) -> str:
        """The name of a wheel's file that it lies in: with all others that attend to a cache of these dtypes."""
        return self.file if _ATTENTION.isdisjoint(self.kinds) else "_".join(("attention", *self.dtypes[:2]))

    def __str__(self) -> str:
        """For people."""
        dtypes = " over ".join(dict.fromkeys(self.dtypes[:2]))
        return f"{', '.join(self.kinds).replace('_', ' ')} ({dtypes})"

    def key(self) -> LibraryKey:
        """Return what it depends on."""
        folders = frozenset(re.findall(r"^from mojo_ops\.(\w+)", program_of([self]), flags=re.MULTILINE))
        return LibraryKey(f"library {self.kinds} {self.dtypes} {self.mask}", PROGRAM, folders)


def built_encodings(dtype: str, mask: int) -> int:
    """The encodings of the library that a step's products of x of `dtype` by weights in those of `mask` use: all where
    the library of all is on this machine, as it takes two minutes to build, else `mask`.
    """
    library = Kernel(_QUANTISED[0], (dtype,), ALL_ENCODINGS).library
    return ALL_ENCODINGS if _there([library]) else mask


def kernel_named(name: str) -> Kernel:
    """The kernel of a name.

    Raises:
        ContractError: it is none.
    """
    parts = name.removeprefix("paged_kv_").split("_")
    for length in range(len(parts), 0, -1):
        kind = "_".join(parts[:length])
        if kind in KINDS:
            rest = " ".join(parts[length:]).replace("float8 ", "float8_").split()
            mask = int(rest.pop()) if kind in _QUANTISED else 0
            return Kernel(kind, tuple(rest), mask)
    raise ContractError(f"name: expected a kernel of this package, got {name}")


def api_libraries() -> list[Library]:
    """The libraries of calls over host arrays and of models' steps, but for outputs of another dtype than q's."""
    narrow = (*FLOAT8_DTYPES, *FORMATS)
    pairs = [(q, kv) for q in Q_DTYPES for kv in (q, *narrow)]
    of_api = [Kernel("append", ("uint8", "uint8")), *(Kernel("merge", (q,)) for q in Q_DTYPES)]
    of_api.append(Kernel("delta_rule", ("float32",)))
    for dtype in ("float32", "bfloat16"):
        of_api += [Kernel(kind, (dtype,)) for kind in ("program", "causal_conv1d")]
        kinds = ("experts", "adapter_linear")
        of_api += [Kernel(kind, (dtype, w)) for kind in kinds for w in dict.fromkeys((dtype, "bfloat16"))]
    of_api += [Kernel("linear", ("float32", "bfloat16")), Kernel("quantised_linear", ("float32",), ALL_ENCODINGS)]
    for q, kv in pairs:
        of_api += [Kernel(kind, (q, kv, q)) for kind in ("attention", "masked_attention")]
        if kv not in FORMATS:
            of_api += [Kernel(kind, (q, kv, q)) for kind in ("attention_rotated", "masked_attention_rotated", "latent")]
    return list(dict.fromkeys(kernel.library for kernel in of_api))


KINDS = (
    *(*_ATTENTION, "merge", "append", "gather", "linear", "experts", "adapter_linear"),
    *(*_QUANTISED, *_RECURRENT, *_LAYERS, *_RECURRENT_LAYERS),
)


def kernel(kind: str, *dtypes: str, mask: int = 0, sources: Path | None = None) -> Function:
    """The function of a kernel; its library is loaded, or built now.

    Args:
        kind: As `Kernel`.
        dtypes: As `Kernel`.
        mask: As `Kernel`.
        sources: The folder of the Mojo sources; the package's where None.

    Raises:
        ToolchainError: the sources do not compile, or as `Store`.
    """
    requested = Kernel(kind, dtypes, mask)
    function = _FUNCTIONS.get((sources, requested))
    return _loaded(requested, sources) if function is None else function


def load(kernels: Iterable[Kernel], *, exact: bool = False) -> None:
    """Loads the libraries of some kernels; builds those that are missing, together.

    Args:
        kernels: The kernels.
        exact: Build for this very CPU rather than take what came with the package for a lower target.

    Raises:
        ToolchainError: as `kernel`.
    """
    # Calls of the API load what they need each time, and looking for files takes some 20 ms.
    missing = [each for each in kernels if exact or (None, each) not in _FUNCTIONS]
    paths = _paths(list(dict.fromkeys(each.library for each in missing)), exact=exact) if missing else {}
    for each in missing:
        _loaded(each, None, paths[each.library])


def load_for_graph(name: str) -> None:
    """Loads the library of the kernel `name`, which an op of a graph needs. Raises as `kernel`."""
    _loaded(kernel_named(name), None)


class _State:
    """State that a fork changes."""

    def __init__(self) -> None:
        self.loading, self.packing = Lock(), Lock()
        self.has_built = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.loading, self.packing = Lock(), Lock()  # a thread that the child lacks may hold the others


_STATE = _State()
_FUNCTIONS: dict[tuple[Path | None, Kernel], Function] = {}
_FREE = ctypes.CDLL(None).free
_FREE.argtypes, _FREE.restype = [ctypes.c_void_p], None


def _loaded(requested: Kernel, sources: Path | None, path: Path | None = None) -> Function:
    with _STATE.loading:
        if (sources, requested) not in _FUNCTIONS:
            library = requested.library
            path = path or (_paths([library])[library] if sources is None else _built_from(sources, library))
            _check_layouts(ctypes.CDLL(str(path)), library)
            # An op of a graph, and the team of threads, look for functions among the names that all of the process
            # sees.
            loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            for each in library.kernels():
                _FUNCTIONS[sources, each] = _function(loaded, each.name)
    return _FUNCTIONS[sources, requested]


def _built_from(sources: Path, library: Library) -> Path:
    """Builds a library from other sources than the package's, for this process alone."""
    path = Path(tempfile.mkdtemp(dir=_own_folder()), "library.so")
    build_libraries([library], path, apply_cpu_target(), package=sources)
    return path


def _check_layouts(loaded: ctypes.CDLL, library: Library) -> None:
    """Refuses a library of kernels that take other operands than `call_layouts.py` has.

    Raises:
        ToolchainError: as said.
    """
    export = loaded["paged_kv_layouts"]
    export.restype = ctypes.c_void_p
    exported = dict(line.split(" ", 1) for line in text_at(export()).split("\n")[1:])
    for kind in library.kinds:
        if (got := exported.get(kind)) != (expected := CALLS[kind].text):
            raise ToolchainError(f"{kind}: expected a library that takes {expected}, got {got}")


def _function(library: ctypes.CDLL, name: str) -> Function:
    function = library[name]
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_void_p

    def call(operands: bytes) -> None:
        message = function(operands)
        if message:
            raise ContractError(text_at(message))

    return call


def text_at(address: int) -> str:
    """The text that a library has put at an address, whose memory is freed."""
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        _FREE(address)


def _paths(libraries: Sequence[Library], *, exact: bool = False) -> dict[Library, Path]:
    """The files of libraries, which are built where they are missing; for this process alone where none can be kept.

    Raises:
        ToolchainError: as `kernel`.
    """
    check_cpu_runs(get_virtual_cpu_target(), CpuInfo.read())
    loadable = {library: _unsealed(artefact) for library, (artefact, _) in _there(libraries, exact=exact).items()}
    paths = {library: path for library, path in loadable.items() if path}
    missing = [library for library in libraries if library not in paths]
    return paths | _built(missing) if missing else paths


def _built(missing: Sequence[Library]) -> dict[Library, Path]:
    target, store, by_itself = apply_cpu_target(), user_libraries(), not _STATE.has_built
    keys = {library: library.key() for library in missing}
    digests = digests_of(keys, Sources.installed())

    def make(path: Path) -> None:
        what = "; ".join(map(str, missing))
        announce(f"paged-kv: building kernels for {what}: 10 s and more, once on this machine")
        build_libraries(missing, path, target, by_itself=by_itself)
        if digests_of(keys, Sources.installed()) != digests:
            raise ToolchainError("a source was edited while it was compiled: try again")

    names = list(digests.values())
    # Again where it failed: CI lost a file once while other compilers ran, for no reason that was found.
    reason = store.keep(names, make) and store.keep(names, make)
    paths = {digest: path for each in store.find(names) if (path := _unsealed(each)) for digest in each.digests}
    if len(paths) < len(names):
        reason = reason or f"{store.path} cannot be written"
        warnings.warn(f"libraries of kernels are not kept ({reason}): each start builds them", RuntimeWarning, 5)
        path = Path(_own_folder(), f"{min(names)}.so")
        make(path)
        paths = dict.fromkeys(names, path)
    return {library: paths[digest] for library, digest in digests.items()}


def _unsealed(artefact: Artefact) -> Path | None:
    """The bare .so of an artefact: dlopen rejects the trailing checksum."""
    return Store(user_libraries().path / "loaded").plain(artefact, f"{min(artefact.names)}.so")


def user_libraries() -> Store:
    """The libraries of the user's cache folder."""
    return Store(cache_path() / "libraries", "{}.library")


def _there(libraries: Iterable[Library], *, exact: bool = False) -> dict[Library, tuple[Artefact, str]]:
    """The best existing file of each library, and its place in words; libraries without one are left out."""
    apply_cpu_target()  # which the names of files have in them
    cpu, sources = CpuInfo.read(), Sources.installed()
    keys = {library: library.key() for library in libraries}
    there: dict[Library, tuple[Artefact, str]] = {}
    for target, place in places(cpu, user_libraries, exact=exact):
        digests = digests_of(keys, sources, target)
        artefacts = {digest: each for each in place.find(digests.values()) for digest in each.digests}
        for library in [library for library, digest in digests.items() if digest in artefacts]:
            there[library] = artefacts[digests[library]], origin(place, target)
            del keys[library]
        if not keys:
            break
    return there


def where_libraries_lie(libraries: Iterable[Library]) -> dict[str, str]:
    """The place of each library in words, by its file's name; libraries that a call would build are left out."""
    return {library.file: where for library, (_, where) in _there(libraries).items()}


_OWN: list[tempfile.TemporaryDirectory[str]] = []


def _own_folder() -> str:
    """A folder of this process alone."""
    if not _OWN:
        _OWN.append(tempfile.TemporaryDirectory(prefix="paged-kv-", ignore_cleanup_errors=True))
    return _OWN[0].name


def build_libraries(
    libraries: Sequence[Library],
    path: Path,
    target: str | None,
    *,
    by_itself: bool = False,
    package: Path | None = None,
) -> None:
    """Builds libraries, in one file, for a CPU target or for this CPU.

    Args:
        libraries: Their kernels are all in it.
        path: The file to be written.
        target: LLVM's name of the CPU; None for this one.
        by_itself: Whether no other build is expected. The sources of the package are packed once for all builds,
            which takes longer than what one of them gains by it.
        package: The folder of the Mojo sources; the package's where None.

    Raises:
        OSError: a file cannot be written.
        ToolchainError: the sources do not compile.
    """
    package = package or kernels()
    _STATE.has_built = True
    if not by_itself or is_packed(package):
        with _STATE.packing:  # once, where several are built
            package = kernel_library(package)
    _build(program_of(libraries), ["-I", str(package.parent), "-DPAGED_KV_LIBRARY"], path, target)


def program_of(libraries: Iterable[Library]) -> str:
    """The program that exports all kernels of some libraries, each once: its parts of `library.mojo`."""
    head, export, layouts, sections = _parts_of_program()
    exported = list(dict.fromkeys(kernel for library in libraries for kernel in library.kernels()))
    kinds = list(dict.fromkeys(kernel.kind for kernel in exported))
    parts = [sections[kind] for kind in kinds]
    struct_of = {kind: _STRUCT.findall(sections[kind])[0] for kind in kinds}
    for kernel in exported:
        parameters = [f"DType.{dtype}" for dtype in kernel.dtypes] + [str(kernel.mask)] * (kernel.kind in _QUANTISED)
        called = f"{kernel.kind}[{', '.join(parameters)}]"
        struct = struct_of[kernel.kind]
        parts.append(export.replace("NAME", kernel.name).replace("KERNEL", called).replace("STRUCT", struct))
    line = 'add(text, "\\n{} ")\n    add_layout[{}](text)'
    lines = "\n    ".join(line.format(kind, struct) for kind, struct in struct_of.items())
    return "".join([head, *parts, layouts.replace("LINES", lines)])


_STRUCT = re.compile(r"\(call: (\w+)\)")
"""The struct of a kernel's call, in its part of `library.mojo`."""


@cache
def _parts_of_program() -> tuple[str, str, str, dict[str, str]]:
    text = (resources("paged_kv.runtime") / PROGRAM).read_text()
    head, *parts = re.split(r"^# (Export|Layouts|Kernel \w+)\n", text, flags=re.MULTILINE)
    sections = {title.removeprefix("Kernel "): body for title, body in zip(parts[::2], parts[1::2], strict=True)}
    return head, sections.pop("Export"), sections.pop("Layouts"), sections


def _build(program: str, options: list[str], path: Path, target: str | None) -> None:
    """Compiles the text of a program to a library.

    Raises:
        OSError: a file cannot be written.
        ToolchainError: the sources do not compile.
    """
    source, compiled = path.with_suffix(".mojo"), path.with_suffix(".o")
    source.write_text(program)
    command = ["build", "--emit", "object", "-O3", *options, *([f"--target-cpu={target}"] if target else [])]
    linker = _brought("lld", "bin")
    _run(partial(_run_mojo, [*command, str(source), "-o", str(compiled)], linker))
    needed = _brought("libKGENCompilerRTShared.so", "lib")
    command = [str(linker), "-flavor", "gnu", "-shared", "--strip-all", str(compiled), str(needed), "-o", str(path)]
    _run(partial(subprocess.run, command))
    source.unlink()
    compiled.unlink()


_COMPILER = """
import os, sys
from mojo.run import subprocess_run_mojo
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sys.argv[1]])
sys.exit(subprocess_run_mojo(sys.argv[2:]).returncode)
"""


def _run_mojo(arguments: list[str], linker: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the Mojo compiler, which requires a C compiler on the PATH even where it links nothing.

    One on the PATH comes first, and the linker stands in where there is none; neither is called.
    """
    with tempfile.TemporaryDirectory(prefix="paged-kv-") as folder:
        Path(folder, "cc").symlink_to(linker)
        return subprocess.run([sys.executable, "-c", _COMPILER, folder, *arguments], **options)


def _run(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    try:
        done = run(capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{PROGRAM}: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        if any(".mojo:" in line for line in errors):
            raise ToolchainError(f"{PROGRAM} does not compile: {'; '.join(errors)}")
        raise OSError("; ".join(line.partition("error: ")[2] for line in errors) or f"exit status {done.returncode}")


def _brought(name: str, folder: str) -> Path:
    """A file of the package mojo-compiler.

    Raises:
        ToolchainError: it is missing.
    """
    for file in files("mojo-compiler") or ():
        if file.parts[-3:] == ("modular", folder, name):
            return Path(str(file.locate()))
    raise ToolchainError(f"mojo-compiler brings no {name}: reinstall it")
