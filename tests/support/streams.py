"""Runs the command line in a process of its own with a stdout or stderr that is closed, full, or read by nobody."""

import os
import resource
import subprocess
import sys

COMMAND = [sys.executable, "-c", "from paged_kv.cli import main; main()"]
BROKEN = ("closed", "full", "limited", "left")
"""What may be wrong with a stream: not open, on a full device, past the size that a file may have, a pipe without a
reader."""


def run(arguments, tmp_path, *, command=COMMAND, stdout=None, stderr=None, timeout=120, **environment):
    """Exit status, stdout and stderr; a stream that is one of `BROKEN` is empty."""
    broken = {1: stdout, 2: stderr}
    opened = {number: _open(kind, tmp_path / f"stream{number}") for number, kind in broken.items() if kind is not None}

    def in_child():
        for number, kind in broken.items():
            if kind == "closed":
                os.close(number)
            if kind == "limited":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))

    streams = {"stdout": opened.get(1, subprocess.PIPE), "stderr": opened.get(2, subprocess.PIPE)}
    environment = os.environ | {"PYTHONUNBUFFERED": ""} | environment
    command = [*command, *map(str, arguments)]
    try:
        done = subprocess.run(command, **streams, env=environment, preexec_fn=in_child, timeout=timeout)
    finally:
        for number in opened.values():
            os.close(number)
    return done.returncode, *(text.decode() if text else "" for text in (done.stdout, done.stderr))


def _open(kind, file):
    if kind == "limited":
        return os.open(file, os.O_WRONLY | os.O_CREAT)
    if kind == "left":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open("/dev/full", os.O_WRONLY)
