"""The Mojo programs of tests/mojo, run or compiled by the `mojo` of this environment."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "mojo"
MOJO = Path(sys.executable).parent / "mojo"


def mojo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MOJO, *arguments], capture_output=True, text=True, timeout=300, check=False)


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return mojo("run", "--Werror", "-I", ROOT, TESTS / name, *arguments)
