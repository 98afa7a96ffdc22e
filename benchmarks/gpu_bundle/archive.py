"""Folders as compressed archives in pieces, and pieces in transfers: each below the limits of the way to the host.

A transfer is a folder with its pieces, `pieces.json`, which names them, and `install.py`, which unpacks them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_kv.errors import ContractError

PIECE_BYTES = 27_000_000
TRANSFER_BYTES = 2 * PIECE_BYTES
"""With the 12 MB of a checkout that travels beside it, a transfer stays below 64 MiB."""
_BLOCK = 1 << 20
# Calls of x86 code are made absolute first, and the dictionary spans a whole library.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]


@dataclass(frozen=True)
class Archive:
    """One compressed file, and the pieces of it."""

    name: str
    pieces: tuple[Path, ...]


def pack(folders: Iterable[tuple[Path, str]], target: Path) -> Path:
    """Writes folders, each under a name of its own, to one `.tar.xz`; caches of Python are left out."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in member.name else member

    with lzma.open(target, "wb", filters=_FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for folder, name in folders:
            archive.add(folder, name, filter=kept)
    return target


def split(archive: Path, piece_bytes: int = PIECE_BYTES) -> Archive:
    """Cuts a file into pieces of at most `piece_bytes`, `NAME.00`, `NAME.01`, ..., beside it; the file itself goes."""
    pieces: list[Path] = []
    with archive.open("rb") as whole:
        while True:
            piece = archive.with_name(f"{archive.name}.{len(pieces):02}")
            left = piece_bytes
            with piece.open("wb") as part:
                while left and (block := whole.read(min(left, _BLOCK))):
                    left -= part.write(block)
            if left == piece_bytes and pieces:  # nothing was left
                piece.unlink()
                break
            pieces.append(piece)
            if left:
                break
    archive.unlink()
    return Archive(archive.name, tuple(pieces))


def transfers(
    archives: Sequence[Archive], out: Path, *, transfer_bytes: int = TRANSFER_BYTES, extra: Sequence[Path] = ()
) -> list[Path]:
    """Moves the pieces, in their order, into folders `call1`, `call2`, ... of at most `transfer_bytes`.

    An archive may go over several folders: `install.py` unpacks it when it has all its pieces. Files of `extra` are
    copied into each folder.

    Raises:
        ContractError: a piece alone is larger than a transfer.
    """
    names = {archive.name: [piece.name for piece in archive.pieces] for archive in archives}
    folders: list[list[Path]] = []
    room = 0
    overhead = sum(path.stat().st_size for path in extra) + _BLOCK  # of pieces.json
    for piece in (piece for archive in archives for piece in archive.pieces):
        size = piece.stat().st_size
        if size + overhead > transfer_bytes:
            raise ContractError(f"{piece.name} has {size} bytes, a transfer at most {transfer_bytes}")
        if size > room:
            folders.append([])
            room = transfer_bytes - overhead
        folders[-1].append(piece)
        room -= size
    written = []
    for number, pieces in enumerate(folders, 1):
        folder = out / f"call{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        listed = {piece.name: _sha256(piece) for piece in pieces}
        (folder / "pieces.json").write_text(json.dumps({"archives": names, "sha256": listed}, indent=1))
        for piece in pieces:
            piece.rename(folder / piece.name)
        for path in extra:
            shutil.copy(path, folder)
        written.append(folder)
    return written


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
