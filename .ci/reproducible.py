"""An sdist and a wheel whose bytes depend on the sources alone, not on when, where or by whom they were built.

setuptools writes into an sdist who owned each file and when it was changed, and takes permissions from the checkout.
So the sdist is written once more, sorted, and the wheel is built from it.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def build(source: Path, out: Path, epoch: int, python: str = sys.executable) -> tuple[Path, Path]:
    """Builds both into `out`.

    Args:
        source: A copy of the sources, in which the build may write.
        out: An existing folder.
        epoch: Seconds since 1970, the time of every file in the archives.
        python: An interpreter that has setuptools.

    Raises:
        subprocess.CalledProcessError: the build failed; its output was shown.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist = out / _backend(python, "build_sdist", source, folder, epoch)
        normalise(folder / sdist.name, sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        wheel = _backend(python, "build_wheel", unpacked, out, epoch)
    return sdist, out / wheel


def normalise(archive: Path, target: Path, epoch: int) -> None:
    """Writes a `.tar.gz` once more: sorted, without owners, each file of the same time, readable by all."""
    with (
        tarfile.open(archive) as old,
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)


def _backend(python: str, hook: str, source: Path, out: Path, epoch: int) -> str:
    """The name of the file that a hook of setuptools makes in `out`."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]), file=sys.stderr)"
    done = subprocess.run(
        [python, "-c", code, str(out)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
        umask=0o022,  # of what it copies
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stderr.splitlines()[-1]
