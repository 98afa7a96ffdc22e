"""Unpacks the pieces beside this file into a folder of the host. Needs Python alone.

    python3 install.py TARGET

Call it once for each transfer, with the same target: an archive is unpacked when its last piece is there. Anything
that is not as it was sent ends it with one line and exit status 1.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 1 << 20


class Joined(io.RawIOBase):
    """Files one after the other, as one that is read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while True:
            if self._file is None:
                if not self._paths:
                    return 0
                self._file = self._paths.pop(0).open("rb")
            block = self._file.read(len(target))
            if block:
                target[: len(block)] = block
                return len(block)
            self._file.close()
            self._file = None


def install(source: Path, target: Path) -> list[str]:
    """Keeps the pieces of `source` in `target`, and unpacks each archive that is whole; their names.

    Raises:
        ValueError: a piece is missing or not as it was sent.
    """
    listed = json.loads((source / "pieces.json").read_text())
    waiting = target / "pieces"
    waiting.mkdir(parents=True, exist_ok=True)
    for name, expected in listed["sha256"].items():
        if not (source / name).is_file():
            raise ValueError(f"{name} is not in {source}: send the folder again")
        with (source / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise ValueError(f"{name} is not as it was sent: send the folder again")
        shutil.copy(source / name, waiting / name)
    unpacked = []
    for archive, pieces in listed["archives"].items():
        paths = [waiting / name for name in pieces]
        if not all(path.is_file() for path in paths):
            continue
        with (
            lzma.open(io.BufferedReader(Joined(paths), BLOCK)) as whole,
            tarfile.open(fileobj=whole, mode="r|") as members,
        ):
            members.extractall(target, filter="data")
        for path in paths:
            path.unlink()
        unpacked.append(archive)
    return unpacked


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python3 install.py TARGET")
        return 2
    started, target = time.monotonic(), Path(arguments[0]).absolute()
    try:
        unpacked = install(Path(__file__).absolute().parent, target)
    except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        print(f"not installed: {error}")
        return 1
    print(f"{target}: unpacked {', '.join(unpacked) or 'nothing yet'} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
