"""The import contracts of pyproject.toml ([tool.importlinter]): which module of `paged_kv` may know which.

import-linter reads packages from folders that bear their names, so it is given a copy of the Python files, laid out as
they are installed. Exit status 1 where a contract is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packages import ROOT, lay_out


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        # The copy comes before an installed paged_kv.
        environment = {**os.environ, "PYTHONPATH": folder}
        program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
        command = [sys.executable, "-c", program, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
        return subprocess.run(command, env=environment, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
