"""Opens what a path names only where it is a regular file: a pipe would wait for its other end, a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any, Literal

_NOT_WAITING = getattr(os, "O_NONBLOCK", 0)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_regular(path: Path | str, *, follow: bool = True) -> IO[bytes]:
    """A regular file to read. It is opened first and looked at then, so that none can take its place in between.

    Args:
        path: The path of the file.
        follow: Whether a symbolic link is followed; one in the last place of the path, otherwise, is an error.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: the system's encoding lacks a character of the path, or it has a NUL byte.
    """
    return _opened(path, os.O_RDONLY | (0 if follow else getattr(os, "O_NOFOLLOW", 0)), "rb")


def write_regular(path: Path | str, mode: Literal["w", "wb"] = "w") -> IO[Any]:
    """A regular file to write text or bytes to, empty; made where it is missing. Raises as `open_regular`."""
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)


def read_regular(path: Path | str, most: int | None = None) -> bytes:
    """The content of a regular file of at most so many bytes. Raises as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, expected {most} at most", str(path))
        return file.read(size)


def path_of(file: IO[bytes]) -> str:
    """A path of an open file for a library that takes no file: of this very file where the system has such names."""
    own = f"/dev/fd/{file.fileno()}"
    return own if os.path.exists(own) else str(file.name)


def is_own(status: os.stat_result) -> bool:
    """Return whether the user owns a file or folder, and no other user can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS


def _opened(path: Path | str, flags: int, mode: str) -> IO[Any]:
    def opener(name: str, _: int) -> int:
        number = os.open(name, flags | _NOT_WAITING | getattr(os, "O_CLOEXEC", 0), 0o666)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return number

    return open(path, mode, opener=opener, encoding=None if "b" in mode else "utf-8")
