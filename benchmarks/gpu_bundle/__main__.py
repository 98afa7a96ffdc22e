"""Makes the bundle: python -m benchmarks.gpu_bundle OUT [options]; README.md here says how it is used.

`OUT/home` is what the host unpacks, `OUT/send` what is sent. What is there already and is not out of date is kept: MAX
by its version, graphs by their keys.
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
from benchmarks.gpu_bundle.contents import PIECE_BYTES, pack, pieces
from paged_kv.errors import PagedKVError
from paged_kv.versions import PINNED

Result = TypeVar("Result")


def make(arguments: argparse.Namespace) -> Path:
    """Writes everything; the folder to send."""
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
    archives = [_timed("packing this package", lambda: pack(home, ".", out / "paged-kv.tar.xz"))]
    if not arguments.no_max:
        archives.append(_max_runtime(out, arguments.python))
    if arguments.wheels is not None:
        extra = out / "wheels"
        contents.wheels(extra, arguments.wheels)
        archives.append(pack(extra / "site", "site", out / "wheels.tar.xz"))
        shutil.rmtree(extra)
    return pieces(archives, out / "send", arguments.piece_bytes)


def _own(home: Path) -> None:
    contents.own_package(home / "site")
    contents.tests(home)
    contents.scripts(home)


def _max_runtime(out: Path, python: str) -> Path:
    """MAX for the host, which is packed once for each version: it takes minutes."""
    packed = out / f"max-{PINNED['max']}-python{python}.tar.xz"
    if not packed.exists():
        unpacked, unfinished = out / "max", packed.with_suffix(".new")
        _timed("MAX", lambda: contents.max_runtime(unpacked / "site", python, out))
        _timed("packing MAX", lambda: pack(unpacked / "site", "site", unfinished))
        unfinished.rename(packed)
        shutil.rmtree(unpacked)
    return packed


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
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that the host shall have too")
    parser.add_argument(
        "--no-max", action="store_true", help="this package alone, for a host that has the rest unpacked"
    )
    parser.add_argument("--no-graphs", action="store_true", help="do not compile graphs that are missing")
    parser.add_argument("--no-programs", action="store_true", help="do not build the Mojo programs again")
    try:
        folder = make(parser.parse_args())
    except PagedKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sizes = [path.stat().st_size for path in folder.iterdir()]
    print(f"{folder}: {sum(sizes) / 1e6:.1f} MB in {len(sizes)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
