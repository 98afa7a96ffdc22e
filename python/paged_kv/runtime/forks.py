"""Forked processes: a child has none of its parent's threads, and what is given to MAX's waits for ever.

MAX starts its threads with the first device of a process. A child that is forked before has none to miss and starts its
own; one that is forked later cannot, as it inherits the device. There every call is refused, and C's exit handlers are
left out, as in the children of `multiprocessing`: MAX's waits for the threads, so the process would never end.
"""

from __future__ import annotations

import ctypes
import os

from paged_kv.errors import ToolchainError
from paged_kv.runtime.threads import pool_has_started


class _Forks:
    """The forks that this process descends from."""

    def __init__(self) -> None:
        self._parent_has_threads = False
        self.lost_threads = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._parent_has_threads = (
            pool_has_started() is not False
        )  # where the system does not list threads: there may be some

    def _in_child(self) -> None:
        if self._parent_has_threads and not self.lost_threads:
            self.lost_threads = True
            libc = ctypes.CDLL(None)
            if hasattr(libc, "on_exit"):  # the last handler that is registered runs first
                libc.on_exit(libc._exit, None)


_FORKS = _Forks()


def check_not_forked() -> None:
    """Refuses to go on where MAX could only hang.

    Raises:
        ToolchainError: this process was forked off one in which MAX ran.
    """
    if _FORKS.lost_threads:
        raise ToolchainError(
            "this process was forked after MAX had started its threads, which a fork does not copy: start it with"
            " multiprocessing's 'spawn' or 'forkserver', or fork before anything of paged_kv runs"
        )
