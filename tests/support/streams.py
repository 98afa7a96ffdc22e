"""Runs the command line in a process of its own with a stdout or stderr that is closed, full, or a broken pipe."""

import os
import subprocess
import sys

COMMAND = [sys.executable, "-c", "from paged_kv.cli import main; main()"]
BROKEN = ("closed", "full", "limited", "left")
"""The faults of a stream: not open, on a full device, past the size that a file may have, a pipe without a
reader."""
_SHELL = {"closed": "{}>&-", "full": "{}>/dev/full", "limited": '{}>"${{STREAM}}{}"'}


def run(arguments, tmp_path, *, command=COMMAND, stdout=None, stderr=None, timeout=600, **environment):
    """Exit status, stdout and stderr; a stream that is one of `BROKEN` is empty."""
    broken = {1: stdout, 2: stderr}
    # A shell prepares the streams: Python would have to fork for it, which threads of other tests do not survive.
    redirected = [_SHELL[kind].format(number, number) for number, kind in broken.items() if kind in _SHELL]
    limit = "ulimit -f 0; " if "limited" in broken.values() else ""
    shell = ["sh", "-c", f'{limit}exec "$@" {" ".join(redirected)}', "-"]
    streams = {1: subprocess.PIPE, 2: subprocess.PIPE} | {n: _left() for n, kind in broken.items() if kind == "left"}
    environment = os.environ | {"PYTHONUNBUFFERED": "", "STREAM": str(tmp_path / "stream")} | environment
    command = [*shell, *command, *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=streams[1], stderr=streams[2], env=environment, timeout=timeout)
    finally:
        for number in streams.values():
            if number != subprocess.PIPE:
                os.close(number)
    return done.returncode, *(text.decode() if text else "" for text in (done.stdout, done.stderr))


def _left():
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer
