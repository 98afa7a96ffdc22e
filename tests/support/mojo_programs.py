"""The Mojo programs of tests/mojo, run or compiled by the `mojo` of this environment."""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "mojo"
MOJO = Path(sys.executable).parent / "mojo"


def mojo(*arguments: str | Path, timeout: int = 1200) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MOJO, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


@functools.cache
def _package() -> tuple[tempfile.TemporaryDirectory[str], str]:
    folder = tempfile.TemporaryDirectory()
    result = mojo("precompile", ROOT / "mojo_ops", "-o", Path(folder.name) / "mojo_ops.mojoc")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


def package() -> Path:
    """The folder of mojo_ops, precompiled: every program of a session parses it from there."""
    return Path(_package()[0].name)


def words_of_the_compiler() -> str:
    """Return what the compiler says of the package."""
    return _package()[1]


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return mojo("run", "--Werror", "-I", package(), TESTS / name, *arguments)


def mojo_tests() -> list[tuple[str, str]]:
    """File and function of every Mojo test."""
    return [
        (path.name, function)
        for path in sorted(TESTS.glob("test_*.mojo"))
        for function in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    ]


@functools.cache
def outcomes() -> tuple[dict[tuple[str, str], str], str]:
    """PASS or FAIL of every Mojo test by file and function, and all that was printed.

    The files are compiled into one program: alone, each takes 5 s before its first test. Every function is named in
    it, so that none is missed.
    """
    files: dict[str, list[str]] = {}
    for file, function in mojo_tests():
        files.setdefault(file.removesuffix(".mojo"), []).append(function)
    lines = ["from std.testing import TestSuite", *(f"import {file}" for file in files), "", ""]
    lines += ["def main() raises:", "    var failed = False"]
    for file, functions in files.items():
        lines += [f'    print("file {file}.mojo")', "    try:", "        var suite = TestSuite()"]
        lines += [f"        suite.test[{file}.{function}]()" for function in functions]
        lines += ["        suite^.run()", "    except error:", "        print(error)", "        failed = True"]
    lines += ["    if failed:", '        raise Error("some tests failed")', ""]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "all_tests.mojo"
        program.write_text("\n".join(lines))
        result = mojo("run", "--Werror", "-I", package(), "-I", TESTS, program, timeout=3600)
    output = result.stdout + result.stderr
    found: dict[tuple[str, str], str] = {}
    for part in result.stdout.split("file ")[1:]:
        file = part.split("\n", 1)[0]
        for outcome, function in re.findall(r"^ +(PASS|FAIL) \[.*?\] (\w+)", part, re.MULTILINE):
            found[file, function] = outcome
    assert (result.returncode == 0) == (set(found.values()) == {"PASS"}), output
    return found, output
