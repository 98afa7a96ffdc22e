"""The contents of the bundle: of MAX what runs compiled graphs, this package, its tests, programs and graphs.

`pack` and `pieces` make what is sent of them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.gpu_bundle import steps
from paged_kv.bench.provenance import commit
from paged_kv.errors import ToolchainError
from paged_kv.runtime.compile_key import Sources
from paged_kv.versions import PINNED, VERSION

PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIBRARIES = (
    *("libmax", "libMGPRT", "libnixl", "libAsyncRTMojoBindings"),
    *("libAsyncRTRuntimeGlobals", "libKGENCompilerRTShared", "libMSupportGlobals"),
)
"""Those that a process with MAX has mapped. The compiler, the linker and the assembler are other files: 240 MB less."""
NOT_TO_RUN = ("max/pipelines/", "max/serve/", "max/benchmark/", "max/include/", "max/_xgrammar/")
"""Parts of MAX's Python that are left out: its models and its server."""
NEEDED = ("msgspec",)
"""Packages that MAX imports and a host with torch may lack; click, numpy, psutil, rich and typing_extensions it has."""
PIECE_BYTES = 27_000_000
"""The largest file that is sent."""
# Calls of x86 code are made absolute first, and the dictionary spans a whole library.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
PYTEST_INI = """\
[pytest]
pythonpath = tests
addopts = --import-mode=importlib
"""


def max_runtime(site: Path, python: str, work: Path) -> None:
    """MAX for the host's Python, without its compiler: libraries from this environment, the rest from its wheel."""
    for requirement in (f"max=={PINNED['max']}", *NEEDED):
        _unpack(_download(requirement, python, work), site)
    (site / "modular" / "lib").mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        shutil.copy(_installed("modular") / "lib" / f"{library}.so", site / "modular" / "lib")
    for package in ("mojo", "_mojo"):
        shutil.copytree(_installed(package), site / package, dirs_exist_ok=True, ignore=_CACHES)
    distribution(site, "mojo", PINNED["mojo"])
    # MAX looks for its libraries beside the compiler's folder; and what would compile says why it cannot.
    compiler = site / "modular" / "bin" / "mojo"
    compiler.parent.mkdir(exist_ok=True)
    compiler.write_text("#!/bin/sh\necho 'error: this bundle has no Mojo compiler' >&2\nexit 1\n")
    compiler.chmod(0o755)


def own_package(site: Path) -> None:
    """The package as the wheel has it; benchmarks beside it. Its sources are those that the keys of compiled graphs
    are made of: of the package that is running, whether it was installed with `-e` or not.
    """
    package = site / "paged_kv"
    shutil.rmtree(package, ignore_errors=True)
    for name, folder in Sources.installed().folders.items():  # the package's own first
        shutil.copytree(folder, package / name, ignore=_CACHES, dirs_exist_ok=True)
    benchmarks = site / "benchmarks"
    shutil.rmtree(benchmarks, ignore_errors=True)
    shutil.copytree(CHECKOUT / "benchmarks", benchmarks, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (benchmarks / "COMMIT").write_text(f"{commit()}\n")
    distribution(site, "paged_kv", VERSION)


def tests(out: Path) -> None:
    """The tests that the steps name, with settings of their own."""
    shutil.rmtree(out / "tests", ignore_errors=True)
    shutil.copytree(CHECKOUT / "tests", out / "tests", ignore=shutil.ignore_patterns("__pycache__", "data", "results"))
    (out / "tests" / "pytest.ini").write_text(PYTEST_INI)


def scripts(out: Path) -> None:
    """Copy what runs the steps."""
    shutil.copy(Path(__file__).with_name("run.py"), out)
    (out / "steps.json").write_text(steps.as_json(commit()))


def programs(out: Path) -> list[str]:
    """Builds the Mojo programs for the GPU and the host's CPU; the names of those that did not build, with reasons."""
    folder = out / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    targets = [f"--target-accelerator={steps.ARCHITECTURE}", f"--target-cpu={steps.CPU_TARGET}"]
    failed = []
    for name, source in steps.PROGRAMS.items():
        command = [str(Path(sys.executable).with_name("mojo")), "build", *targets, "-I", str(CHECKOUT)]
        command += ["-o", str(folder / name), str(CHECKOUT / "tests" / "mojo" / source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            failed.append(f"{name}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    return failed


def models(out: Path) -> None:
    """Writes the small models and what is expected of them, where they are not yet.

    Raises:
        ToolchainError: they cannot be made; the process has said why.
    """
    folder = out / "cache" / "paged-kv" / "models"
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        command = [sys.executable, "-m", "benchmarks.gpu_bundle.families", unfinished]
        result = subprocess.run(command, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": path}, check=False)
        if result.returncode != 0:
            raise ToolchainError(f"the models of the bundle cannot be made (exit status {result.returncode})")
        shutil.copytree(unfinished, folder)


def compiled_graphs(out: Path, device: str) -> None:
    """Compiles what is missing of the graphs of `device`, "gpu" or "cpu", in a process of its own.

    Raises:
        ToolchainError: a graph does not compile; those before it are kept.
    """
    cache = out / "cache"
    (cache / "paged-kv").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_bundle.graphs", device]
    # What MAX keeps of its own is for compilers, and does not travel.
    folders = {"XDG_CACHE_HOME": str(cache), "MODULAR_CACHE_DIR": str(out.with_name("max-cache"))}
    result = subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **folders}, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"the graphs for the {device} do not compile (exit status {result.returncode})")


def forget_older_graphs(out: Path) -> None:
    """Removes what was compiled from older sources, and the Mojo package, which is for compilers."""
    cache = out / "cache" / "paged-kv"
    shutil.rmtree(cache / "kernels", ignore_errors=True)
    listed = [json.loads(path.read_text()) for path in cache.glob("*.json")]
    if len(listed) < 2:  # one for the CPU, one for the GPU: without both nothing is known to be old
        return
    current = {digest for graphs in listed for named in graphs.values() for digest in named.values()}
    for path in (cache / "compiled").glob("*.graph"):
        if path.stem not in current:
            path.unlink()


def wheels(out: Path, folder: Path) -> None:
    """Unpacks wheels that the user wants on the host beside MAX, FlashInfer's for one."""
    for wheel in sorted(folder.glob("*.whl")):
        _unpack(wheel, out / "site")


def pack(folder: Path, name: str, target: Path) -> Path:
    """Writes a folder, under a name of its own, to a `.tar.xz`; caches of Python are left out."""
    with lzma.open(target, "wb", filters=_FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        archive.add(folder, name, filter=lambda member: None if "__pycache__" in member.name else member)
    return target


def pieces(archives: Iterable[Path], folder: Path, piece_bytes: int = PIECE_BYTES) -> Path:
    """Writes what is sent: archives in pieces `NAME.00`, `NAME.01`, ..., their checksums and `install.sh`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for archive in archives:
        subprocess.run(["split", "-d", f"--bytes={piece_bytes}", archive, folder / f"{archive.name}."], check=True)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    shutil.copy(Path(__file__).with_name("install.sh"), folder)
    return folder


def distribution(site: Path, name: str, version: str) -> None:
    """The metadata that says a package is installed: versions are in the keys of compiled graphs."""
    facts = site / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


_CACHES = shutil.ignore_patterns("__pycache__")


def _installed(package: str) -> Path:
    """The folder of a package of this environment.

    Raises:
        ToolchainError: it is not installed.
    """
    spec = find_spec(package)
    folders = list((spec and spec.submodule_search_locations) or ())
    if not folders:
        raise ToolchainError(f"{package} is not installed here: the bundle takes MAX's libraries from this environment")
    return Path(folders[0])


def _unpack(wheel: Path, site: Path) -> None:
    """Lays out a wheel as an installer would, but for what no step runs."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            if ".data/" in name:
                kind, _, name = name.partition(".data/")[2].partition("/")
                if kind not in ("platlib", "purelib"):
                    continue
            if name.startswith(NOT_TO_RUN) or name.endswith((".pyi", "/")):
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def _download(requirement: str, python: str, folder: Path) -> Path:
    """A wheel for the host's Python, from the package index.

    Raises:
        ToolchainError: there is none.
    """
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command: Sequence[str] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fresh]
        command = [*command, "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        for platform in PLATFORMS:
            command = [*command, "--platform", platform]
        result = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
        downloaded = list(Path(fresh).glob("*.whl"))
        if result.returncode != 0 or len(downloaded) != 1:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ToolchainError(f"no wheel of {requirement} for Python {python}: {reason}")
        target = folder / downloaded[0].name
        downloaded[0].replace(target)
        return target
