"""The standard streams of a command: results are written or the command fails, and messages never make it fail."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

import click

FAILED = 1
"""The exit status where stdout could not be written."""


def with_streams(command: Callable[[], int]) -> int:
    """The exit status of `command`, which writes results to stdout and messages to stderr; 1 where stdout fails.

    A stdout that is closed, full, or of an encoding that lacks a character is one line on stderr. A reader that left
    (a broken pipe) is not. Messages are lost where stderr is closed or full: the exit status remains.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    warnings.formatwarning = _in_one_line
    if sys.stdout is None:
        return _fail("it is closed")
    original = sys.stdout
    sys.stdout = stdout = _Stdout(original)
    try:
        status = command()
        stdout.flush()
    except (OSError, UnicodeEncodeError) as error:
        if stdout.error is None:
            say(f"error: {error}")
            status = FAILED
    finally:
        if stdout.error is not None:
            _discard(stdout)
        stdout.release()
        sys.stdout = original
        _flush_messages()
    return status if stdout.error is None else _reported(stdout.error)


def say(message: str) -> None:
    """A line on stderr, or nowhere if that cannot be written."""
    try:
        click.echo(" ".join(message.split()) if message.startswith("error:") else message, err=True)
    except OSError:
        _discard(sys.stderr)


class _Stdout(io.TextIOWrapper):
    """Stdout, which records the first error of a write: code that writes, perhaps of a library, may catch the error."""

    error: OSError | UnicodeEncodeError | None = None

    def __init__(self, stdout: TextIO) -> None:
        settings = {name: getattr(stdout, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        # `python -u` has no buffer: what the system does not take of a write would be lost.
        buffer = stdout.buffer
        self._added = io.BufferedWriter(buffer) if isinstance(buffer, io.RawIOBase) else None
        super().__init__(self._added or buffer, newline="\n", **settings)

    def release(self) -> None:
        """Leaves the stream below open, which would be closed with this one."""
        self.detach()
        if self._added is not None:
            self._added.detach()

    def write(self, text: str) -> int:
        try:
            written = super().write(text)
            if self.write_through:
                super().flush()
            return written
        except (OSError, UnicodeEncodeError) as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.error = self.error or error
            raise


def _reported(error: OSError | UnicodeEncodeError) -> int:
    if isinstance(error, UnicodeEncodeError):
        return _fail(f"{error.object[error.start : error.end]!a} cannot be written in {error.encoding}")
    return FAILED if error.errno == errno.EPIPE else _fail(error.strerror or str(error))


def _fail(reason: str) -> int:
    say(f"error: stdout: {reason}")
    return FAILED


def _flush_messages() -> None:
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Sends what is still in the buffer to nowhere: Python would report it once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _in_one_line(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {' '.join(str(message).split())}\n"
