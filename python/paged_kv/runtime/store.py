"""Compiled graphs and kernels on disk. An artefact is code that this process will run: only a whole one of the user's
own is read, and its bytes are checked before anything else sees them.

The folder has mode 0700. A folder that belongs to another user, or that others can write to, is an error: nothing in
it can be trusted, and nothing is written to it. A single file of that kind, or one that is no plain file (a symbolic
link leads out of the folder), is as if it were missing; a file that is not whole is removed. The next compile makes
them anew. Nothing else in the folder is touched.

A folder that cannot be written, or that cannot be made, is no error: what it holds is used, and nothing is kept.

A seal at the end of a file tells that it is whole before a reader of code, which may crash, sees it:

    content | names, 32 characters each | SHA-256 of both | bytes of content | number of names | magic

It takes 0.6 ms a megabyte (Zen 5). It tells damage, not malice: who can write the file can seal it, and the folder is
the user's alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.files import is_own, open_regular
from paged_kv.runtime.cache_folder import NO_CACHE, cache_path

_DIGEST = re.compile(r"[0-9a-f]{32}")
_CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
_MAGIC = b"PKV-SEAL"
_SEAL = struct.Struct("<32sQQ8s")
_NAME_BYTES = 32


@dataclass
class Artefact:
    """A whole file."""

    path: Path
    content: bytes
    """The content that was kept, without the seal."""
    names: frozenset[str]
    """All digests that it was kept under."""
    digests: set[str] = field(default_factory=set)
    """Those that were asked for."""


class Store:
    """A folder of artefacts, named after the digests of their keys.

    Graphs that are compiled together lie in one file, which has a name (a hard link) for each of them.

    Args:
        path: The folder, made where it is missing and that can be done.
        pattern: The name of a file, with `{}` for the digest.

    Raises:
        ToolchainError: the folder is not the user's own (the message has path, owner and mode), or its place is taken
            by something else.
    """

    def __init__(self, path: Path, pattern: str = "{}.graph") -> None:
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
        if not stat.S_ISDIR(status.st_mode) or not is_own(status):
            raise ToolchainError(
                f"artefact folder {path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}: it holds"
                f" code to run, so it must be a folder of user {os.geteuid()} that no other user can write to;"
                " remove it, or set XDG_CACHE_HOME to another folder"
            )
        if status.st_mode & 0o077:
            with suppress(OSError):  # a file system that cannot be written
                path.chmod(stat.S_IMODE(status.st_mode) & 0o700)

    def find(self, digests: Iterable[str]) -> list[Artefact]:
        """The whole files under these names, each once. Those that are not whole are removed."""
        artefacts: dict[tuple[int, int], Artefact] = {}
        for digest in digests:
            path = self.path_of(digest)
            with _opened(path) as file:
                if file is None:
                    continue
                status = os.fstat(file.fileno())
                artefact = artefacts.get((status.st_dev, status.st_ino)) or read_sealed(path, file)
            if artefact is None or digest not in artefact.names:
                self.remove(path)
                continue
            artefacts[status.st_dev, status.st_ino] = artefact
            artefact.digests.add(digest)
        return list(artefacts.values())

    def keep(self, digests: Sequence[str], write: Callable[[Path], object]) -> str | None:
        """Puts one file under several names, each of which appears when the file is whole and sealed.

        Another process may keep the same names at the same time: each name is one of the two whole files.

        Args:
            digests: The names.
            write: Writes the file, given its path, which ends in its first name.

        Returns:
            None, or in words why nothing is kept: the disk is full, the folder cannot be written.
        """
        paths = [self.path_of(digest) for digest in digests]
        try:
            with self._unfinished() as folder:
                whole = Path(folder, paths[0].name)
                write(whole)
                seal(whole, digests)
                whole.chmod(0o600)
                for path in paths[1:]:
                    name = Path(folder, path.name)
                    try:
                        os.link(whole, name)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(whole, name)
                        name.chmod(0o600)
                    os.replace(name, path)
                os.replace(whole, paths[0])
        except OSError as error:
            reason = self._missing or error
            lost = f": {reason.filename}" if reason.errno == errno.ENOENT else ""
            return f"{self.path}: {reason.strerror or reason}{lost}"
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
            with self._unfinished() as folder:
                whole = Path(folder, name)
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
        """Return where the file of a digest lies, or would."""
        if not _DIGEST.fullmatch(digest):
            raise ContractError(f"digest: expected 32 hexadecimal digits, got {digest!r}")
        return self.path / self._pattern.format(digest)

    def _unfinished(self) -> tempfile.TemporaryDirectory[str]:
        """A folder inside for what is not whole yet."""
        return tempfile.TemporaryDirectory(dir=self.path, prefix=".", ignore_cleanup_errors=True)


def user_store() -> Store:
    """The artefacts of this package, in the user's cache folder.

    Raises:
        ToolchainError: as `cache_path` and `Store`.
    """
    return Store(cache_path() / "compiled")


def seal(file: Path, names: Sequence[str]) -> None:
    """Appends the seal to a file, which has one of `names`, each of 32 ASCII characters."""
    content = file.read_bytes()
    listed = "".join(names).encode()
    with file.open("ab") as opened:
        opened.write(listed + _SEAL.pack(_sha256(content, listed), len(content), len(names), _MAGIC))


def read_sealed(path: Path, file: IO[bytes]) -> Artefact | None:
    """Return what an open file holds, None where it is not whole. No more is read than its seal promises."""
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(-_SEAL.size, os.SEEK_END)
        digest, length, count, magic = _SEAL.unpack(file.read(_SEAL.size))
        if magic != _MAGIC or length + count * _NAME_BYTES + _SEAL.size != size:
            return None
        file.seek(0)
        content, listed = file.read(length), file.read(count * _NAME_BYTES)
    except (OSError, struct.error):  # too short, or cut short meanwhile
        return None
    if _sha256(content, listed) != digest:
        return None
    names = listed.decode("ascii", errors="replace")
    # Under another name than these it is another file's copy.
    return Artefact(path, content, frozenset(names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES)))


def _sha256(content: bytes, listed: bytes) -> bytes:
    digest = hashlib.sha256(content)
    digest.update(listed)
    return digest.digest()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | None]:
    """The file that is safe to read, None where there is none."""
    try:
        file = open_regular(path, follow=False)
    except OSError:  # missing, a link, a pipe, or not readable
        yield None
        return
    with file:
        yield file if is_own(os.fstat(file.fileno())) else None
