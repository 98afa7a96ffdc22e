"""Compiled graphs and kernels on disk. An artefact is code that this process will run: only a whole one of the user's
own is read, and its bytes are checked before anything else sees them (`seal.py`).

The folder has mode 0700. A folder that belongs to another user, or that others can write to, is an error: nothing in
it can be trusted, and nothing is written to it. A single file of that kind, or one that is no plain file (a symbolic
link leads out of the folder), is as if it were missing; a file that is not whole is removed. The next compile makes
them anew. Nothing else in the folder is touched.

A folder that cannot be written, or that cannot be made, is no error: what it holds is used, and nothing is kept.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.cache_folder import NO_CACHE, cache_path
from paged_kv.runtime.seal import sealed_content, write_seal

_DIGEST = re.compile(r"[0-9a-f]{32}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A pipe under an artefact's name must not make the open wait for a writer.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


@dataclass
class Artefact:
    """A whole file."""

    path: Path
    content: bytes
    """What was stored, without the seal."""
    names: frozenset[str]
    """All digests that it was stored under."""
    digests: set[str] = field(default_factory=set)
    """Those that were asked for."""


class ArtefactFolder:
    """A folder of artefacts, named after the digests of their keys.

    Graphs that are compiled together lie in one file, which has a name (a hard link) for each of them.

    Args:
        path: The folder, made where it is missing and that can be done.
        pattern: The name of a file, with `{}` for the digest.
        hidden: Whether other users may not read it. A folder that the user named keeps its mode.

    Raises:
        ToolchainError: the folder is not the user's own (the message has path, owner and mode), or its place is taken
            by something else.
    """

    def __init__(self, path: Path, pattern: str = "{}.graph", *, hidden: bool = True) -> None:
        self.path = path
        self._pattern = pattern
        self._missing: OSError | None = None  # why there is no folder
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # looked at below
                path.mkdir(mode=0o700)
            status = path.lstat()
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise ToolchainError(NO_CACHE.format(error)) from error
            self._missing = error
            return
        if not stat.S_ISDIR(status.st_mode) or not _is_own(status):
            raise ToolchainError(
                f"artefact folder {path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}: it holds"
                f" code to run, so it must be a folder of user {os.geteuid()} that no other user can write to;"
                " remove it, or set XDG_CACHE_HOME to another folder"
            )
        if hidden and status.st_mode & 0o077:
            with suppress(OSError):  # a file system that cannot be written
                path.chmod(stat.S_IMODE(status.st_mode) & 0o700)

    def find(self, digests: Iterable[str]) -> list[Artefact]:
        """The whole files under these names, each once. Those that are not whole are removed."""
        found: dict[tuple[int, int], Artefact] = {}
        for digest in digests:
            path = self.path_of(digest)
            with _opened(path) as file:
                if file is None:
                    continue
                status = os.fstat(file.fileno())
                artefact = found.get((status.st_dev, status.st_ino)) or _read(path, file, status.st_size)
            if artefact is None or digest not in artefact.names:
                self.remove(path)
                continue
            found[status.st_dev, status.st_ino] = artefact
            artefact.digests.add(digest)
        return list(found.values())

    def store(self, digests: Sequence[str], write: Callable[[Path], object]) -> str | None:
        """Puts one file under several names, each of which appears when the file is whole and sealed.

        Another process may store the same names at the same time: each name is one of the two whole files.

        Args:
            digests: The names.
            write: Writes the file, given its path, which ends in its first name.

        Returns:
            None, or in words why nothing is kept: the disk is full, the folder cannot be written.
        """
        paths = [self.path_of(digest) for digest in digests]
        try:
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".", ignore_cleanup_errors=True) as unfinished:
                whole = Path(unfinished, paths[0].name)
                write(whole)
                write_seal(whole, digests)
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
            reason = self._missing or error
            return f"{self.path}: {reason.strerror or reason}"
        return None

    def plain(self, artefact: Artefact, name: str) -> Path | None:
        """The content alone in a file of the folder, for a reader that knows no seal; None where that cannot be made.

        A file of that name that is the user's own and has the content is taken; any other one is replaced.
        """
        path = self.path / name
        with _opened(path) as file:
            if file is not None and file.read(len(artefact.content) + 1) == artefact.content:
                return path
        try:
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".", ignore_cleanup_errors=True) as unfinished:
                whole = Path(unfinished, name)
                whole.write_bytes(artefact.content)
                whole.chmod(0o600)
                os.replace(whole, path)
        except OSError:
            return None
        return path

    def remove(self, path: Path) -> None:
        """Forgets one name of a damaged file."""
        with suppress(OSError):  # another process has done it, or the folder cannot be written
            path.unlink()

    def path_of(self, digest: str) -> Path:
        """Where the file of a digest lies, or would."""
        if not _DIGEST.fullmatch(digest):
            raise ContractError(f"an artefact is named by 32 hexadecimal digits, not {digest!r}")
        return self.path / self._pattern.format(digest)


def user_artefacts() -> ArtefactFolder:
    """The artefacts of this package, in the user's cache folder.

    Raises:
        ToolchainError: as `cache_path` and `ArtefactFolder`.
    """
    return ArtefactFolder(cache_path() / "compiled")


def warn_not_kept(reason: str) -> None:
    """Says once a process that what was compiled is not kept."""
    warnings.warn(f"compiled graphs are not kept ({reason}): each start compiles them", RuntimeWarning, 2)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """The file that is safe to read, None where there is none."""
    try:
        number = os.open(path, _OPEN_FLAGS)
    except OSError:  # missing, a link, or not readable
        yield None
        return
    try:
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode) and _is_own(status):
            with open(number, "rb", closefd=False) as file:
                yield file
        else:
            yield None
    finally:
        os.close(number)


def _read(path: Path, file: BinaryIO, size: int) -> Artefact | None:
    sealed = sealed_content(file, size)
    return None if sealed is None else Artefact(path, sealed.content, sealed.names)


def _is_own(status: os.stat_result) -> bool:
    """Whether the user owns it and no other user can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
