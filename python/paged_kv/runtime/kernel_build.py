"""Compiling libraries of kernels ahead, for CPUs that need not be here: what `python -m paged_kv.build_kernels` does.

A process compiles for one target, so each file of each target gets a process of its own. One that lies there whole,
under today's digest, is not compiled again.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.compile_key import Key, Sources, digests_of
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from paged_kv.runtime.installed import INDEX, LIBRARY, Index, read_compressed
from paged_kv.runtime.libraries import Library, build_libraries
from paged_kv.runtime.store import seal
from paged_kv.runtime.threads import compiles_at_a_time
from paged_kv.versions import PINNED, VERSION

TARGETS = ("haswell", "skylake-avx512", "znver4", "znver5", "sapphirerapids")
"""The levels that people have: every CPU with AVX2 runs one of them."""

_SECONDS = 1800
"""After which a compile has hung: one takes 15 to 40 s on an idle core."""


@dataclass(frozen=True)
class KernelFile:
    """One file: libraries for a target."""

    folder: Path
    target: str
    name: str
    bundle: tuple[Library, ...]

    @property
    def path(self) -> Path:
        return self.folder / self.target / f"{self.name}{LIBRARY}"

    @property
    def keys(self) -> Mapping[str, Key]:
        """The key of each library, by its name."""
        return {library.file: library.key() for library in self.bundle}

    def digests(self, sources: Sources) -> dict[str, str]:
        """Return the digest of each library, by its name."""
        return digests_of(self.keys, sources, self.target)

    def is_whole(self, sources: Sources) -> bool:
        """Return whether it lies there, compiled from these sources."""
        try:
            return read_compressed(self.path).names == frozenset(self.digests(sources).values())
        except (OSError, ValueError):
            return False


def build(
    bundles: Mapping[str, tuple[Library, ...]],
    folder: Path,
    targets: Sequence[str] = TARGETS,
    *,
    only: Sequence[str] | None = None,
    jobs: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Compiles what `folder` lacks, and writes the index of each target.

    Args:
        bundles: All that the folder may hold, by the name of the file.
        folder: Gets a folder for each target; made where it is missing.
        targets: LLVM's names, of `REQUIRED_FLAGS`.
        only: Names of the bundles to compile; all of them where None.
        jobs: Compiles at a time.
        report: Gets a line for each file.

    Returns:
        A line for each file that could not be compiled.

    Raises:
        ContractError: a target or a bundle is not known; another one would end the process.
        ToolchainError: the folder cannot be written, or this is no x86-64 machine.
    """
    chosen = tuple(bundles) if only is None else only
    for what, names, legal in (("target", targets, REQUIRED_FLAGS), ("bundle", chosen, bundles)):
        for name in names:
            if name not in legal:
                raise ContractError(f"{what}: expected one of {', '.join(legal)}, got {name!r}")
    if (machine := platform.machine().lower()) not in ("x86_64", "amd64"):
        raise ToolchainError(f"kernels are compiled ahead on a machine of x86-64, got {machine}")
    sources = Sources.installed()
    files = [KernelFile(folder, target, name, bundles[name]) for target in targets for name in chosen]
    try:
        for file in files:
            file.path.parent.mkdir(parents=True, exist_ok=True)
        missing = [file for file in files if not file.is_whole(sources)]
        report(f"{len(files) - len(missing)} of {len(files)} files are there")
        failures = list(_compile_all(missing, compiles_at_a_time() if jobs is None else jobs, report))
        for target in targets:
            _write_index([KernelFile(folder, target, name, bundle) for name, bundle in bundles.items()], sources)
    except OSError as error:
        raise ToolchainError(f"{folder}: {error.strerror or error}") from error
    return failures


def _compile_all(files: Sequence[KernelFile], jobs: int, report: Callable[[str], None]) -> Iterator[str]:
    """Return what went wrong, a line for each file that is not there now."""
    # Caches of their own: what other programs left in theirs has no part in what is shipped. The Mojo package, which is
    # no machine code yet, is compiled once for all.
    with tempfile.TemporaryDirectory(prefix="paged-kv-build-") as cache, ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_compile_in_a_process, file, cache): file for file in files}
        try:
            for done, future in enumerate(as_completed(running), 1):
                file, failure = running[future], future.result()
                size = "failed" if failure else f"{file.path.stat().st_size} bytes"
                report(f"{done} of {len(files)}: {file.target} {file.name}, {size}")
                if failure:
                    yield f"{file.target} {file.name}: {failure}"
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_in_a_process(file: KernelFile, cache: str) -> str | None:
    """Compiles one file; the reason in words where that failed."""
    command = [sys.executable, "-m", __name__]
    # From a cache that other files have used, MAX takes machine code with functions of theirs: up to six times the
    # bytes, and dependent on the order of compiles.
    with tempfile.TemporaryDirectory(dir=cache) as of_max:
        environment = {**os.environ, "MODULAR_CACHE_DIR": of_max, "XDG_CACHE_HOME": cache}
        try:
            done = subprocess.run(
                command, env=environment, input=pickle.dumps(file), capture_output=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not compiled in {_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    messages = [" ".join(line.split()) for line in lines if line.strip()]
    return messages[-1] if messages else f"the compiler ended with status {done.returncode}"


def compile_file(file: KernelFile) -> None:
    """Compiles one file.

    Raises:
        ToolchainError: the sources do not compile, or changed meanwhile.
        OSError: the file cannot be written.
    """
    digests = file.digests(Sources.installed())
    with tempfile.TemporaryDirectory(dir=file.path.parent, prefix=".") as unfinished:
        plain, whole = Path(unfinished, "plain"), Path(unfinished, "whole")
        build_libraries(file.bundle, plain, file.target)
        content = plain.read_bytes()
        if file.digests(Sources.installed()) != digests:
            raise ToolchainError("a source was edited while it was compiled")
        whole.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        seal(whole, list(digests.values()))
        whole.chmod(0o644)
        os.replace(whole, file.path)


def _write_index(files: Sequence[KernelFile], sources: Sources) -> None:
    """Lists the files of one target that are whole."""
    folder, target = files[0].folder, files[0].target
    graphs: dict[str, dict[str, str]] = {}
    listed = {}
    for file in files:
        if not file.is_whole(sources):
            continue
        content = file.path.read_bytes()
        listed[file.path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        graphs |= {digest: {"name": name, "file": file.path.name} for name, digest in file.digests(sources).items()}
    index = Index(target, REQUIRED_FLAGS[target], {"paged-kv": VERSION, **PINNED}, graphs, listed)
    unfinished = folder / target / f".{INDEX}"
    index.write(unfinished)
    os.replace(unfinished, folder / target / INDEX)


def main() -> None:
    """`python -m paged_kv.runtime.kernel_build`: compiles the file that its parent pickled to stdin."""
    try:
        compile_file(pickle.load(sys.stdin.buffer))
    except (ToolchainError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
