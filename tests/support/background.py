"""Slow processes that tests wait for: they run while other tests do.

A compiler keeps one core busy, a test another. So a job, a function without arguments that mostly waits for a process,
starts when the tests that want it have been collected (`conftest.py`), and these tests come last:

    pytestmark = pytest.mark.waits_for(job)
"""

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

Result = TypeVar("Result")

SECONDS = 3600
"""The limit of a job and those before it in the queue; each limits its own processes."""

_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="background")
_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()


class Job(Generic[Result]):
    """A function that is run once; calling the job gives its result, or raises what it raised."""

    def __init__(self, function: Callable[[], Result], *, is_long: bool = False) -> None:
        """A job that `is_long` starts before the others: at the end it would keep one core busy alone."""
        self._function = function
        self.is_long = is_long
        self._future: Future[Result] | None = None

    def start(self) -> None:
        """Puts it in the queue, once."""
        if self._future is None:
            self._future = _POOL.submit(self._function)

    def __call__(self) -> Result:
        if self._future is None or self._future.cancel():  # not begun: the caller runs it
            self._future = Future()
            try:
                self._future.set_result(self._function())
            except BaseException as error:
                self._future.set_exception(error)
        return self._future.result(SECONDS)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with text; ends with the session."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=env
    ) as process:
        with _lock:
            _running.add(process)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        finally:
            with _lock:
                _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def stop() -> None:
    """Gives up what has not ended: the session has."""
    _POOL.shutdown(wait=False, cancel_futures=True)
    with _lock:
        for process in _running:
            process.kill()
