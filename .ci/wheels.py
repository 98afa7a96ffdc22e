"""Builds the wheels: `python .ci/wheels.py --kernels DIR --out DIR`, in the environment of this checkout.

* `paged_kv-V-py3-none-any.whl`: sources; the first call of each kernel compiles it.
* `paged_kv-V-py3-none-PLATFORM.whl`: the same with the kernels of DIR, which `python -m paged_kv.build_kernels` made.
* `paged_kv_kernels-V-py3-none-PLATFORM.whl`: these kernels alone, beside an installation from source.

The same commit and the same kernels give the same bytes: files are sorted, of one mode and of one time, the commit's or
SOURCE_DATE_EPOCH. `provenance.json` beside the kernels says what they are made of.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

from paged_kv.build_kernels import kernel_bundles
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.installed import DISTRIBUTION, INDEX, Index
from paged_kv.runtime.kernel_build import KernelFile
from paged_kv.versions import PINNED, VERSION

ROOT = Path(__file__).resolve().parents[1]

_EARLIEST = 315532800  # 1980: zip files know no earlier time
_STORED = (".xz",)
"""Files that are compressed already."""

Files = dict[str, bytes]


def main() -> None:
    """Writes the wheels and prints their names, sizes and SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, help="a folder of build_kernels; without it the pure wheel alone")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))
    options.out.mkdir(parents=True, exist_ok=True)
    wheels = {f"paged_kv-{VERSION}-py3-none-any.whl": pure_wheel()}
    if options.kernels is not None:
        kernels = read_kernels(options.kernels, Sources.installed())
        kernels["provenance.json"] = provenance(kernels)
        platform = platform_of_max()
        wheels[f"paged_kv-{VERSION}-py3-none-{platform}.whl"] = with_kernels(pure_wheel(), kernels, platform)
        wheels[f"{DISTRIBUTION}-{VERSION}-py3-none-{platform}.whl"] = kernels_alone(kernels, platform)
    for name, files in wheels.items():
        path = options.out / name
        write_wheel(path, files, epoch)
        content = path.read_bytes()
        print(f"{path}: {len(content) / 1e6:.1f} MB, sha256 {hashlib.sha256(content).hexdigest()}")


def pure_wheel() -> Files:
    """The files of the wheel that setuptools builds of this checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would ship what an earlier build left there
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(ROOT)]
        subprocess.run(command, check=True)
        (built,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(built) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}


def read_kernels(folder: Path, sources: Sources) -> Files:
    """The index and the files of each target in a folder, by path below it.

    Raises:
        SystemExit: there is no target, or a kernel of one is missing, damaged or was compiled from other sources.
    """
    targets = sorted(index.parent for index in folder.glob(f"*/{INDEX}"))
    if not targets:
        sys.exit(f"{folder} has no kernels: make them by python -m paged_kv.build_kernels --out {folder}")
    files: Files = {}
    bundles = kernel_bundles()
    for target in targets:
        index = Index.read(target / INDEX)
        for bundle, graphs in bundles.items():
            file = KernelFile(folder, target.name, bundle, graphs)
            name = file.path.name
            if name not in index.files or not file.is_whole(sources):
                sys.exit(f"{target / name} is missing, damaged or of other sources: run build_kernels again")
            content = (target / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != index.files[name]["sha256"]:
                sys.exit(f"{target / name} is not the file of {target / INDEX}: run build_kernels again")
            files[f"{target.name}/{name}"] = content
        files[f"{target.name}/{INDEX}"] = (target / INDEX).read_bytes()
    return files


def provenance(kernels: Mapping[str, bytes]) -> bytes:
    """Return what the kernels are made of: commit, versions, targets, the SHA-256 of each file."""
    targets = sorted({name.partition("/")[0] for name in kernels})
    content = {
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"paged-kv": VERSION, **PINNED},
        "targets": {name: json.loads(kernels[f"{name}/{INDEX}"])["requires"] for name in targets},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(kernels.items())},
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def with_kernels(pure: Files, kernels: Mapping[str, bytes], platform: str) -> Files:
    """The files of the pure wheel and the kernels, for one platform."""
    files = {**pure, **{f"paged_kv/kernels/{name}": data for name, data in kernels.items()}}
    (info,) = (name for name in pure if name.endswith(".dist-info/WHEEL"))
    files[info] = wheel_metadata(platform, _field(pure[info].decode(), "Generator"))
    return files


def kernels_alone(kernels: Mapping[str, bytes], platform: str) -> Files:
    """The files of the wheel that has nothing but kernels."""
    info = f"{DISTRIBUTION}-{VERSION}.dist-info"
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {DISTRIBUTION.replace('_', '-')}",
        f"Version: {VERSION}",
        "Summary: The kernels of paged-kv, compiled ahead",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        f"Requires-Dist: paged-kv=={VERSION}",
    ]
    return {
        f"{DISTRIBUTION}/__init__.py": b'"""Compiled kernels, which paged_kv finds here."""\n',
        **{f"{DISTRIBUTION}/{name}": data for name, data in kernels.items()},
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": wheel_metadata(platform, "paged-kv .ci/wheels.py"),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def wheel_metadata(platform: str, generator: str) -> bytes:
    """The WHEEL file of a wheel for one platform."""
    lines = ["Wheel-Version: 1.0", f"Generator: {generator}", "Root-Is-Purelib: false", f"Tag: py3-none-{platform}"]
    return ("\n".join(lines) + "\n").encode()


def platform_of_max() -> str:
    """The platform of the installed MAX, whose libraries the kernels call: `manylinux_2_34_x86_64`."""
    tag = _field(distribution("max").read_text("WHEEL") or "", "Tag")
    platform = tag.rpartition("-")[2]
    if not platform.endswith("x86_64"):
        sys.exit(f"kernels are compiled ahead for x86-64, and the MAX that is installed here is for {platform}")
    return platform


def write_wheel(path: Path, files: Mapping[str, bytes], epoch: int) -> None:
    """A zip file of sorted names, of which RECORD, written anew, is the last."""
    (info,) = {name.partition("/")[0] for name in files if re.fullmatch(r"[^/]+\.dist-info/WHEEL", name)}
    record = f"{info}/RECORD"
    names = sorted((name for name in files if name != record), key=lambda name: (name.startswith(info), name))
    lines = [f"{name},sha256={_hash(files[name])},{len(files[name])}" for name in names] + [f"{record},,"]
    moment = time.gmtime(max(epoch, _EARLIEST))[:6]
    with zipfile.ZipFile(path, "w") as wheel:
        for name in [*names, record]:
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix: modes count
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(_STORED) else zipfile.ZIP_DEFLATED
            data = ("\n".join(lines) + "\n").encode() if name == record else files[name]
            wheel.writestr(entry, data, compresslevel=9)


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _field(text: str, name: str) -> str:
    return next(line.partition(": ")[2] for line in text.splitlines() if line.startswith(f"{name}: "))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
