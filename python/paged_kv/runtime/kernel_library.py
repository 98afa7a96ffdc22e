"""The Mojo package, compiled once for all graphs.

MAX compiles a folder of Mojo sources again for every graph that names it, some 3.5 s each. Here the compiled package
is kept on disk, named by the digest of its sources and the compilers' versions. It holds code that is not yet
specialised: MAX generates instructions from it for the CPU or GPU target in force, so one file serves every target.
A GPU's kernels are named after its file and their module, and are known by that name in a trace of launches.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError

from mojo.run import subprocess_run_mojo

from paged_kv.errors import ToolchainError
from paged_kv.runtime.cache_folder import cache_path
from paged_kv.runtime.compile_key import hash_of
from paged_kv.runtime.store import Store

FILE = "mojo_ops.mojoc"
"""The compiler takes a package's name from the file's, and cuts the names of kernels after some 30 characters."""

_IN_A_SOURCE = re.compile(r"\.mojo:\d+")


def kernel_library(sources: Path) -> Path:
    """The file that a folder of Mojo sources compiles to, for `custom_extensions`; from disk, or made now.

    The sources themselves, which MAX compiles too, where the file cannot be kept.

    Raises:
        ToolchainError: the cache folder cannot be used, or the sources do not compile.
    """
    digest = _digest(sources)
    store = Store(cache_path() / "kernels", "{}.kernels")

    def compile_to(path: Path) -> None:
        compiled = path.with_name(FILE)
        try:
            # From its parent: the names of sources in the code are then the same wherever the package lies.
            command = ["precompile", sources.name, "-o", str(compiled)]
            subprocess_run_mojo(command, cwd=sources.parent, capture_output=True, check=True)
        except CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").splitlines()
            reasons = [line for line in lines if "error:" in line]
            if not any(_IN_A_SOURCE.search(line) for line in reasons):
                raise OSError(f"the Mojo compiler cannot write {compiled}") from error
            raise ToolchainError(f"{sources} does not compile: {'; '.join(reasons)}") from error
        if _digest(sources) != digest:
            raise ToolchainError(f"{sources} was edited while it was compiled: try again")
        compiled.rename(path)

    if not (artefacts := store.find([digest])) and store.keep([digest], compile_to) is None:
        artefacts = store.find([digest])
    if not artefacts:  # another process may have just emptied the cache
        return sources
    # The compiler reads no file with a seal.
    return Store(store.path / digest).plain(artefacts[0], FILE) or sources


def is_packed(sources: Path) -> bool:
    """Return whether `kernel_library` has nothing to compile."""
    return bool(Store(cache_path() / "kernels", "{}.kernels").find([_digest(sources)]))


def _digest(sources: Path) -> str:
    """32 hexadecimal digits, different where a source file or a compiler differs."""
    # The package's name is in what the compiler wrote: under another name it does not parse.
    parts = [version("max").encode(), version("mojo").encode(), FILE.encode()]
    for file in sorted(sources.rglob("*.mojo")):
        parts += [file.relative_to(sources).as_posix().encode(), file.read_bytes()]
    return hash_of(parts)
