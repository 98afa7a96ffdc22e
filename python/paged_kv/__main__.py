"""The entry of the command: `paged-kv`, and `python -m paged_kv`; few imports come before interrupts are provided
for.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line (`cli.main`); an interrupt ends it with status 130, inside an import too."""
    # A shell's background job ignores interrupts, and goes on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from paged_kv.cli import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Python's own, but for imports: a module may catch or print a KeyboardInterrupt, and MAX's then crash."""
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(130)
        at = at.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
