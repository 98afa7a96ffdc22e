"""Runs some cases in this process: `python -m hostile.child SEED FIRST LAST LOG`.

Before each case its number and description go to the log, after it what was wrong, if anything. So a crash or a hang
has a name, which is the last one of the log.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
import warnings
from typing import Any, TextIO

import jax  # noqa: F401  one of the kinds
import torch  # noqa: F401

from hostile.cases import Case, Wrong
from support import harness

HEADROOM = 8 << 30
"""Bytes of address space that the cases may add: allocating more than that raises MemoryError."""


def main(seed: int, first: int, last: int, log: TextIO) -> None:
    write(log, number=None, said="starts")
    harness.libraries()
    harness.code_libraries()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    warnings.filterwarnings("error", module=r"paged_kv\b")
    for number in range(first, last):
        case = Case(seed, number)
        write(log, number=number, said=case.describe())
        write(log, number=number, **outcome(case))


def outcome(case: Case) -> dict[str, Any]:
    """Return whether a case was "right" or "refused", or what is "wrong" with it."""
    try:
        return {"was": case.run()}
    except Wrong as error:
        return {"wrong": f"{case.describe()}: {error}"}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next(
            (f"{frame.filename}:{frame.lineno}" for frame in reversed(frames) if "paged_kv" in frame.filename), "?"
        )
        return {"wrong": f"{case.describe()}: {type(error).__name__} at {at}: {str(error)[:500]}"}


def write(log: TextIO, **record: Any) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()


if __name__ == "__main__":
    with open(sys.argv[4], "a") as opened:
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), opened)
