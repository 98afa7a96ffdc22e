"""mypy over every module of `paged_kv` and `benchmarks`, with the settings of pyproject.toml.

mypy's command finds packages where folders and names agree; here a module's name comes from pyproject.toml, so each
file is handed to mypy together with it. Exit status 1 where mypy finds an error.
"""

from __future__ import annotations

import os
import sys

from mypy.build import build
from mypy.errors import CompileError
from mypy.main import process_options
from mypy.modulefinder import BuildSource
from packages import ROOT, benchmarks, modules


def main() -> int:
    os.chdir(ROOT)
    _, options = process_options([], require_targets=False)  # reads [tool.mypy]
    sources = [BuildSource(str(path), name) for name, path in (*modules(), *benchmarks())]
    try:
        messages = build(sources, options).errors
    except CompileError as error:  # a file that does not parse
        messages = error.messages
    print("\n".join(messages) or f"{len(sources)} modules, no error")
    return 1 if any(": error:" in message for message in messages) else 0


if __name__ == "__main__":
    sys.exit(main())
