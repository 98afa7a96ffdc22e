"""A child process that ends in time, whatever happens: then each wait for it ends, and each read of what it writes."""

import ctypes
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

SECONDS = 600
"""The limit of a child that may compile, on a machine that does other things too."""


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """For `preexec_fn`: a process that outlives a test run that was ended would keep its memory and its port. Nor does
    it ignore SIGINT, as a run in the background of a shell does.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(_LIBC, "prctl"):  # Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def limited(process: subprocess.Popen[Any], seconds: float = SECONDS) -> Iterator[subprocess.Popen[Any]]:
    """As `with process`, but after `seconds` it is killed, with its descendants, who may hold its pipes."""

    def end() -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)  # or it might start another child meanwhile
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in family:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        with process:
            yield process
    finally:
        timer.cancel()


def has_ended(pid: int, seconds: float = 120) -> bool:
    """Return whether a process ends within `seconds`, or has ended though who inherited it has not looked at it yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
