"""From a tag to files that can be published: sdist, wheel, wheels of compiled kernels, checksums, provenance.

    .ci/release OUT_DIR [--kernels DIR [--targets haswell,znver4,...]] [--rehearse] [--demo]

It publishes nothing. It refuses a checkout with changes, a commit without the tag of the version, and a CHANGELOG
without the version's section; then it builds sdist and wheel twice, which must give the same bytes, installs the wheel
in a fresh environment and runs `paged-kv doctor` and a decode call there. `--rehearse` says what it would refuse, and
goes on. docs/notes/release.md says what comes before and after.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import zlib
from pathlib import Path

import changelog

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = "84.2.1"
"""Another one may write other bytes."""


def versions(root: Path = ROOT) -> dict[str, object]:
    """Return what versions.py of a checkout says: VERSION and PINNED."""
    values: dict[str, object] = {}
    exec((root / "python" / "paged_kv" / "versions.py").read_text(), values)
    return values


NOT_SOURCES = ("build", "dist", "site", "*.egg-info", "__pycache__", ".*")
"""Left out of a copy of the sources without git, which a rehearsal takes, too."""
EARLIEST = 315532800
"""1980, the first time that a zip file can hold: that of a copy without git."""


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def commit(root: Path) -> tuple[str, int]:
    """The commit of a checkout and its time; of a copy without git, "unknown" and EARLIEST."""
    try:
        return git(root, "rev-parse", "HEAD"), int(git(root, "log", "-1", "--format=%ct"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", EARLIEST


def refusals(root: Path, version: str) -> list[str]:
    """The reasons why this checkout is no release, a line each."""
    if commit(root)[0] == "unknown":
        return ["git finds no commit here"]
    found = []
    if changed := git(root, "status", "--porcelain").splitlines():
        found.append(f"{len(changed)} files are not as committed, {changed[0].split()[-1]} first")
    tags = [tag for tag in git(root, "tag", "--points-at", "HEAD").splitlines() if tag.startswith("v")]
    if tags != [f"v{version}"]:
        have = f"has {', '.join(tags)}" if tags else "has no tag"
        found.append(f"versions.py says {version}, but the commit {have}: v{version} is needed, and no other")
    try:
        changelog.section((root / "CHANGELOG.md").read_text(), version)
    except ValueError as error:
        found.append(f"{error}: python .ci/changelog.py cut")
    return found


def copy_sources(root: Path, target: Path) -> None:
    """The files of a checkout, without what git ignores."""
    if commit(root)[0] == "unknown":
        shutil.copytree(root, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        return
    for name in git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name)


def build_once(source: Path, out: Path, epoch: int, python: str = sys.executable) -> tuple[Path, Path]:
    """An sdist and its wheel in `out`, whose bytes depend on the sources alone.

    setuptools writes into an sdist who owned each file and when it was changed, so GNU tar packs it once more.

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
        sdist = out / setuptools_build(python, "build_sdist", source, folder, epoch)
        shutil.unpack_archive(folder / sdist.name, folder / "first", filter="data")
        options = (
            "--sort=name",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
            "--mode=u=rwX,go=rX",
            f"--mtime=@{epoch}",
        )
        (root,) = (folder / "first").iterdir()
        pack = ["tar", *options, "--use-compress-program=gzip -n", "-cf", sdist, "-C", root.parent, root.name]
        subprocess.run(pack, check=True, timeout=300)
        shutil.unpack_archive(sdist, folder / "second", filter="data")
        wheel = setuptools_build(python, "build_wheel", folder / "second" / root.name, out, epoch)
    return sdist, out / wheel


def setuptools_build(python: str, hook: str, source: Path, out: Path, epoch: int) -> str:
    """The name of the file that a hook of setuptools, "build_sdist" or "build_wheel", makes in `out`."""
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


def build(root: Path, out: Path, epoch: int, python: str = sys.executable) -> list[Path]:
    """The sdist and the wheel of a checkout, in `out`.

    Raises:
        SystemExit: two builds differ.
    """
    built = []
    with tempfile.TemporaryDirectory() as name:
        for attempt in ("first", "second"):
            source, folder = Path(name, attempt, "source"), Path(name, attempt, "out")
            folder.mkdir(parents=True)
            copy_sources(root, source)
            built.append(build_once(source, folder, epoch, python))
        for one, other in zip(*built, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise SystemExit(f"two builds of {one.name} differ")
        return [Path(shutil.copy(path, out)) for path in built[0]]


def make_environment(folder: Path, *packages: str | Path) -> Path:
    """The Python of a new environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=1200)
    return python


def try_out(python: Path, folder: Path, *, demo: bool) -> None:
    """Do what a user does first, in a new folder and with a cache that know nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    folder.mkdir()
    command = python.with_name("paged-kv")
    commands = [[command, "doctor"], [python, ROOT / ".ci" / "smoke.py"], *([[command, "demo"]] if demo else [])]
    for arguments in commands:
        subprocess.run(arguments, cwd=folder, env=environment, check=True, timeout=1800)


def build_kernels(python: Path, kernels: Path, targets: str, out: Path, epoch: int) -> list[Path]:
    """The wheels of kernels that are compiled ahead, by the package that was just installed.

    What lies in `kernels` and is whole is not compiled again.
    """
    chosen = ["--targets", targets] if targets else []
    compile_ = [python, "-m", "paged_kv.build_kernels", "--out", kernels, *chosen]
    subprocess.run(compile_, check=True, timeout=6 * 3600)
    with tempfile.TemporaryDirectory() as name:
        pack = [python, ROOT / ".ci" / "wheels.py", "--kernels", kernels, "--out", name]
        subprocess.run(pack, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}, check=True, timeout=1800)
        built = sorted(path for path in Path(name).glob("*.whl") if not path.name.endswith("-none-any.whl"))
        return [Path(shutil.copy(path, out)) for path in built]


def provenance(root: Path, files: list[Path], targets: list[str], *, rehearsed: bool) -> str:
    """Return where the files come from, as JSON. It holds no time but the commit's: made again, it is the same."""
    found = versions(root)
    name, epoch = commit(root)
    facts = {
        "name": "paged-kv",
        "version": found["VERSION"],
        "commit": name,
        "time_of_commit": datetime.datetime.fromtimestamp(epoch, datetime.UTC).isoformat(),
        "rehearsal": rehearsed,
        "needs": found["PINNED"],
        "kernel_targets": targets,
        "built_with": {
            "python": platform.python_version(),
            "setuptools": SETUPTOOLS,
            "zlib": zlib.ZLIB_RUNTIME_VERSION,
            "machine": platform.machine(),
        },
        "files": {path.name: {"sha256": digest(path), "bytes": path.stat().st_size} for path in files},
    }
    return json.dumps(facts, indent=2) + "\n"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that is empty or not there")
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="compile kernels ahead into DIR, and make wheels")
    parser.add_argument("--targets", default="", help="CPUs of --kernels, with commas; default: those of build_kernels")
    parser.add_argument("--rehearse", action="store_true", help="say what would be refused, and go on")
    parser.add_argument("--demo", action="store_true", help="try `paged-kv demo` too")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if out.is_dir() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    version = str(versions()["VERSION"])
    for refusal in (refused := refusals(ROOT, version)):
        print(f"{'would be refused' if arguments.rehearse else 'refused'}: {refusal}", file=sys.stderr)
    if refused and not arguments.rehearse:
        return 1
    out.mkdir(parents=True, exist_ok=True)
    _, epoch = commit(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        builder = make_environment(folder / "builder", f"setuptools=={SETUPTOOLS}")
        files = build(ROOT, out, epoch, str(builder))
        python = make_environment(folder / "fresh", files[-1])
        try_out(python, folder / "sources", demo=arguments.demo)
        if arguments.kernels is not None:
            wheels = build_kernels(python, arguments.kernels.resolve(), arguments.targets, out, epoch)
            whole = next(wheel for wheel in wheels if wheel.name.startswith("paged_kv-"))
            try_out(make_environment(folder / "ahead", whole), folder / "kernels", demo=arguments.demo)
            files += wheels
    targets = sorted(path.name for path in arguments.kernels.iterdir() if path.is_dir()) if arguments.kernels else []
    facts = out / "provenance.json"
    facts.write_text(provenance(ROOT, files, targets, rehearsed=arguments.rehearse))
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in (*files, facts))
    (out / "SHA256SUMS").write_text(sums)
    print(f"paged-kv {version} in {out}, not published:\n{sums}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
