"""Compiled graphs and kernels on disk. An artefact is code that this process will run, so it must be the user's own.

The folder has mode 0700. A folder that belongs to another user, or that others can write to, is an error: nothing in
it can be trusted, and nothing is written to it. A single file of that kind, or one that is no plain file (a symbolic
link leads out of the folder), is never loaded: it is as if it were missing, and the next compile replaces it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.cache_folder import cache_folder

_DIGEST = re.compile(r"[0-9a-f]{32}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ArtefactFolder:
    """A folder of artefacts, named after the digests of their keys.

    Graphs that are compiled together lie in one file, which has a name (a hard link) for each of them.

    Args:
        path: The folder, made where it is missing.
        pattern: The name of a file, with `{}` for the digest.

    Raises:
        ToolchainError: the folder cannot be made, or is not the user's own; the message has path, owner and mode.
    """

    def __init__(self, path: Path, pattern: str = "{}.mef") -> None:
        self.path = path
        self._pattern = pattern
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise ToolchainError(f"artefact folder {path}: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode) or not _is_own(status):
            raise ToolchainError(
                f"artefact folder {path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}: it holds"
                f" code to run, so it must be a folder of user {os.geteuid()} that no other user can write to;"
                " remove it, or set XDG_CACHE_HOME to another folder"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            path.chmod(0o700)

    def find(self, digests: Iterable[str]) -> dict[Path, set[str]]:
        """The files under these names that are safe to load, each once, and which of the names each has."""
        found: dict[tuple[int, int], tuple[Path, set[str]]] = {}
        for digest in digests:
            path = self._path_of(digest)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and _is_own(status):
                found.setdefault((status.st_dev, status.st_ino), (path, set()))[1].add(digest)
        return dict(found.values())

    def store(self, digests: Sequence[str], write: Callable[[Path], None]) -> None:
        """Puts one file under several names, each of which appears when the file is whole.

        Another process may store the same names at the same time: each name is one of the two whole files.

        Args:
            digests: The names.
            write: Writes the file, given its path, which ends in its first name.

        Raises:
            ToolchainError: the file cannot be written.
        """
        paths = [self._path_of(digest) for digest in digests]
        try:
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".") as unfinished:
                whole = Path(unfinished, paths[0].name)
                write(whole)
                whole.chmod(0o600)
                for path in paths[1:]:
                    name = Path(unfinished, path.name)
                    try:
                        os.link(whole, name)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(whole, name)
                        name.chmod(0o600)
                    os.replace(name, path)
                os.replace(whole, paths[0])
        except OSError as error:
            raise ToolchainError(f"artefact folder {self.path}: {error.strerror}") from error

    def remove(self, path: Path) -> None:
        """Forgets one name of a damaged file."""
        path.unlink(missing_ok=True)

    def _path_of(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ContractError(f"an artefact is named by 32 hexadecimal digits, not {digest!r}")
        return self.path / self._pattern.format(digest)


def user_artefacts() -> ArtefactFolder:
    """The artefacts of this package, in the user's cache folder.

    Raises:
        ToolchainError: as `cache_folder` and `ArtefactFolder`.
    """
    return ArtefactFolder(cache_folder() / "compiled")


def _is_own(status: os.stat_result) -> bool:
    """Whether the user owns it and no other user can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
