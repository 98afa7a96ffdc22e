"""The Mojo package, compiled once for all graphs.

MAX compiles a folder of Mojo sources again for every graph that names it, some 3.5 s each. Here the compiled package
is kept on disk, named by the digest of its sources and the compilers' versions. It holds code that is not yet
specialised: MAX generates instructions from it for the CPU or GPU target in force, so one file serves every target.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError

from mojo.run import subprocess_run_mojo

from paged_kv.errors import ToolchainError
from paged_kv.runtime.artefact_folder import ArtefactFolder
from paged_kv.runtime.cache_folder import cache_folder


def kernel_library(sources: Path) -> Path:
    """The file that a folder of Mojo sources compiles to, for `custom_extensions`; read from disk or made now.

    Raises:
        ToolchainError: the cache folder cannot be used, or the sources do not compile.
    """
    # The compiler takes a package's name from the file's: it has to be an identifier.
    folder = ArtefactFolder(cache_folder() / "kernels", "paged_kv_{}.mojoc")

    def compile_to(path: Path) -> None:
        try:
            subprocess_run_mojo(["precompile", str(sources), "-o", str(path)], capture_output=True, check=True)
        except CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").splitlines()
            reason = "; ".join(line for line in lines if "error:" in line)
            raise ToolchainError(f"{sources} does not compile: {reason}") from error
        if _digest(sources) != digest:
            raise ToolchainError(f"{sources} was edited while it was compiled: try again")

    digest = _digest(sources)
    if not (found := folder.find([digest])):
        folder.store([digest], compile_to)
        found = folder.find([digest])
    return next(iter(found), sources)  # the sources, where another process has just emptied the cache


def _digest(sources: Path) -> str:
    """32 hexadecimal digits, different where a source file or a compiler differs."""
    digest = hashlib.sha256()
    parts = [version("max").encode(), version("mojo").encode()]
    for file in sorted(sources.rglob("*.mojo")):
        parts += [file.relative_to(sources).as_posix().encode(), file.read_bytes()]
    for part in parts:
        digest.update(b"%d\n" % len(part))  # no two lists of parts may read the same
        digest.update(part)
    return digest.hexdigest()[:32]
