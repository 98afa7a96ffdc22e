"""Forked processes: a child has none of its parent's threads, and what is given to MAX's waits for ever.

MAX starts its threads with the first device of a process. A child that is forked before has none to miss and starts its
own; one that is forked later cannot, as it inherits the device. There MAX's calls are refused, and C's exit handlers
are left out, as in the children of `multiprocessing`: MAX's waits for the threads, so the process would never end.

A lock that another thread held during the fork stays locked in the child, whose copy of that thread nothing runs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from paged_kv.errors import ToolchainError
from paged_kv.runtime.threads import pool_has_started


class _Forks:
    """The forks that this process descends from."""

    def __init__(self) -> None:
        self._parent_has_threads = False
        self.lost_threads = False
        self.renewals: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._parent_has_threads = (
            pool_has_started() is not False
        )  # where the system does not list threads: there may be some

    def _in_child(self) -> None:
        for owner, renew in list(self.renewals.items()):
            renew(owner)
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


def renew_in_children(owner: Any, renew: Callable[[Any], None]) -> None:
    """Calls `renew(owner)` in each child that is forked while the owner lives: it replaces the owner's locks."""
    _FORKS.renewals[owner] = renew
