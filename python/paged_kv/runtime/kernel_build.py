"""Compiling the API's variants ahead, for CPUs that need not be here: what `python -m paged_kv.build_kernels` does.

A process compiles for one target, so each family of each target gets a process of its own. A family that lies there
whole, under today's digests, is not compiled again.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from max.driver import CPU, set_virtual_cpu_target
from max.engine import InferenceSession, read
from max.graph import DeviceRef, Module

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.api_variants import API_FAMILIES, variant_key
from paged_kv.runtime.artefacts import compile_graphs, export
from paged_kv.runtime.compile_key import Sources, toolchain
from paged_kv.runtime.compiled_ahead import INDEX, SUFFIX, Index, read_compressed
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from paged_kv.runtime.seal import write_seal
from paged_kv.versions import PINNED, VERSION

TARGETS = ("haswell", "skylake-avx512", "znver4", "znver5", "sapphirerapids")
"""The levels that people have: every CPU with AVX2 runs one of them."""

_SECONDS = 1800
"""After which a compile has hung: one takes 15 to 40 s on an idle core."""
_BYTES_OF_A_COMPILE = 2 << 30


@dataclass(frozen=True)
class Piece:
    """One file: a family for a target."""

    folder: Path
    target: str
    family: str

    @property
    def path(self) -> Path:
        return self.folder / self.target / f"{self.family}{SUFFIX}"

    def digests(self, sources: Sources) -> dict[str, str]:
        """Of its graphs, by name."""
        tools = toolchain(self.target)
        return {variant.name: variant_key(variant).digest(sources, tools) for variant in API_FAMILIES[self.family]}

    def is_whole(self, sources: Sources) -> bool:
        """Whether it lies there, compiled from these sources."""
        try:
            return read_compressed(self.path).names == frozenset(self.digests(sources).values())
        except (OSError, ValueError):
            return False


def default_jobs() -> int:
    """Compiles at a time: one a core, as memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // _BYTES_OF_A_COMPILE))


def build(
    folder: Path,
    targets: Sequence[str] = TARGETS,
    *,
    families: Sequence[str] = tuple(API_FAMILIES),
    jobs: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Compiles what `folder` lacks, and writes the index of each target.

    Args:
        folder: Gets a folder for each target; made where it is missing.
        targets: LLVM's names, of `REQUIRED_FLAGS`.
        families: Of `API_FAMILIES`.
        jobs: Compiles at a time.
        report: Gets a line for each file.

    Returns:
        A line for each file that could not be compiled.

    Raises:
        ContractError: a target or a family is not known; another one would end the process.
        ToolchainError: the folder cannot be written, or this is no x86-64 machine.
    """
    for what, names, known in (("target", targets, REQUIRED_FLAGS), ("family", families, API_FAMILIES)):
        for name in names:
            if name not in known:
                raise ContractError(f"{what} {name!r} is none of {', '.join(known)}")
    if (machine := platform.machine().lower()) not in ("x86_64", "amd64"):
        raise ToolchainError(f"kernels are compiled ahead on x86-64, and this is {machine}")
    sources = Sources.installed()
    pieces = [Piece(folder, target, family) for target in targets for family in families]
    try:
        for piece in pieces:
            piece.path.parent.mkdir(parents=True, exist_ok=True)
        missing = [piece for piece in pieces if not piece.is_whole(sources)]
        report(f"{len(pieces) - len(missing)} of {len(pieces)} files are there")
        failures = list(_compile_all(missing, default_jobs() if jobs is None else jobs, report))
        for target in targets:
            _write_index(folder, target, sources)
    except OSError as error:
        raise ToolchainError(f"{folder}: {error.strerror or error}") from error
    return failures


def _compile_all(pieces: Sequence[Piece], jobs: int, report: Callable[[str], None]) -> Iterator[str]:
    """What went wrong, a line for each piece that is not there now."""
    # Caches of their own: what other programs left in theirs has no part in what is shipped.
    with tempfile.TemporaryDirectory(prefix="paged-kv-build-") as cache, ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_compile_in_a_process, piece, cache): piece for piece in pieces}
        try:
            for done, future in enumerate(as_completed(running), 1):
                piece, failure = running[future], future.result()
                size = "failed" if failure else f"{piece.path.stat().st_size} bytes"
                report(f"{done} of {len(pieces)}: {piece.target} {piece.family}, {size}")
                if failure:
                    yield f"{piece.target} {piece.family}: {failure}"
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_in_a_process(piece: Piece, cache: str) -> str | None:
    """Compiles one piece; the reason in words where that failed."""
    command = [sys.executable, "-m", __name__, str(piece.folder), piece.target, piece.family]
    environment = {**os.environ, "MODULAR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not compiled in {_SECONDS} s"
    if done.returncode == 0:
        return None
    said = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"the compiler ended with status {done.returncode}"


def compile_piece(piece: Piece) -> None:
    """Compiles one file in this process, whose CPU target is then the piece's.

    Raises:
        ToolchainError: the sources do not compile, or changed meanwhile.
        OSError: the file cannot be written.
    """
    set_virtual_cpu_target(piece.target)
    session = InferenceSession(devices=[CPU()])
    variants = {variant.name: variant for variant in API_FAMILIES[piece.family]}
    digests = piece.digests(Sources.installed())

    def add(module: Module, names: Sequence[str]) -> None:
        for name in names:
            variants[name].build(module, DeviceRef.CPU())

    compiled = compile_graphs(session, list(variants), add)
    with tempfile.TemporaryDirectory(dir=piece.path.parent, prefix=".") as unfinished:
        plain, whole = Path(unfinished, "plain"), Path(unfinished, "whole")
        export(compiled, plain)
        content = plain.read_bytes()
        names = set(
            session.init_all(read(BytesIO(content)))
        )  # loaded, not run: this CPU may lack the target's features
        if names != set(variants):
            raise ToolchainError(f"MAX calls the graphs {', '.join(sorted(names))}")
        if piece.digests(Sources.installed()) != digests:
            raise ToolchainError("a source was edited while it was compiled")
        whole.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        write_seal(whole, list(digests.values()))
        whole.chmod(0o644)
        os.replace(whole, piece.path)


def _write_index(folder: Path, target: str, sources: Sources) -> None:
    """Lists the files that are whole."""
    graphs: dict[str, dict[str, str]] = {}
    files = {}
    for family in API_FAMILIES:
        piece = Piece(folder, target, family)
        if not piece.is_whole(sources):
            continue
        content = piece.path.read_bytes()
        files[piece.path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        graphs |= {digest: {"name": name, "file": piece.path.name} for name, digest in piece.digests(sources).items()}
    index = Index(target, REQUIRED_FLAGS[target], {"paged-kv": VERSION, **PINNED}, graphs, files)
    unfinished = folder / target / f".{INDEX}"
    index.write(unfinished)
    os.replace(unfinished, folder / target / INDEX)


def main() -> None:
    """`python -m paged_kv.runtime.kernel_build FOLDER TARGET FAMILY`: one file."""
    folder, target, family = sys.argv[1:]
    try:
        compile_piece(Piece(Path(folder), target, family))
    except (ToolchainError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
