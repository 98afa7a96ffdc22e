"""Makes the bundle: python -m benchmarks.gpu_bundle OUT [options]; README.md here says how it is used.

`OUT/home` is what the host unpacks, `OUT/call1`, `OUT/call2`, ... are what is sent. What is there already and is not
out of date is kept: MAX by its version, graphs by their keys.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.gpu_bundle import contents
from benchmarks.gpu_bundle.archive import PIECE_BYTES, TRANSFER_BYTES, Archive, pack, split, transfers
from paged_kv.errors import PagedKVError
from paged_kv.versions import PINNED

Result = TypeVar("Result")

INSTALL = Path(__file__).with_name("install.py")


def make(arguments: argparse.Namespace) -> list[Path]:
    """Writes everything; the folders to send."""
    out: Path = arguments.out.absolute()
    home = out / "home"
    (home / "site").mkdir(parents=True, exist_ok=True)
    _timed("this package, tests, scripts", lambda: _own(home))
    if not arguments.no_programs:
        failed = _timed("programs", lambda: contents.programs(home))
        print("".join(f"  not built: {name}\n" for name in failed), end="")
    _timed("models", lambda: contents.models(home))
    for device in () if arguments.no_graphs else ("cpu", "gpu"):
        _timed(f"graphs of the {device}", partial(contents.compiled_graphs, home, device))
    contents.forget_older_graphs(home)
    ours = _timed("packing this package", lambda: pack([(home, ".")], out / "paged-kv.tar.xz"))
    archives = [split(ours, arguments.piece_bytes)]
    if not arguments.no_max:
        archives.append(_max_runtime(out, arguments.python, arguments.piece_bytes))
    if arguments.wheels is not None:
        extra = out / "wheels"
        contents.wheels(extra, arguments.wheels)
        archives.append(split(pack([(extra / "site", "site")], out / "wheels.tar.xz"), arguments.piece_bytes))
        shutil.rmtree(extra)
    folders = transfers(archives, out, transfer_bytes=arguments.transfer_bytes, extra=[INSTALL])
    for archive in archives:
        print(f"{archive.name}: {len(archive.pieces)} pieces")
    return folders


def _own(home: Path) -> None:
    contents.own_package(home / "site")
    contents.tests(home)
    contents.scripts(home)


def _max_runtime(out: Path, python: str, piece_bytes: int) -> Archive:
    """MAX for the host, which is packed once for each version: it takes minutes."""
    packed = out / f"max-{PINNED['max']}-python{python}.tar.xz"
    if not packed.exists():
        unpacked, unfinished = out / "max", packed.with_suffix(".new")
        _timed("MAX", lambda: contents.max_runtime(unpacked / "site", python, out))
        _timed("packing MAX", lambda: pack([(unpacked / "site", "site")], unfinished))
        unfinished.rename(packed)
        shutil.rmtree(unpacked)
    copy = out / "max.tar.xz"
    shutil.copy(packed, copy)
    return split(copy, piece_bytes)


def _timed(what: str, do: Callable[[], Result]) -> Result:
    started = time.monotonic()
    result = do()
    print(f"{what}: {time.monotonic() - started:.1f} s", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_bundle", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="the host's")
    parser.add_argument("--piece-bytes", type=int, default=PIECE_BYTES)
    parser.add_argument("--transfer-bytes", type=int, default=TRANSFER_BYTES)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that the host shall have too")
    parser.add_argument(
        "--no-max", action="store_true", help="this package alone, for a host that has the rest unpacked"
    )
    parser.add_argument("--no-graphs", action="store_true", help="do not compile graphs that are missing")
    parser.add_argument("--no-programs", action="store_true", help="do not build the Mojo programs again")
    try:
        folders = make(parser.parse_args())
    except PagedKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for folder in folders:
        sizes = [path.stat().st_size for path in folder.iterdir()]
        print(f"{folder}: {sum(sizes) / 1e6:.1f} MB in {len(sizes)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
