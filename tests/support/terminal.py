"""Runs the command line on a terminal of a given width."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from support.limits import limited
from support.streams import COMMAND


def run_in_terminal(arguments, *, columns):
    """Exit status, and all that was shown on the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 1, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [*COMMAND, *map(str, arguments)]
    shown = b""
    with limited(subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)) as child:
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # the child has left
            pass
        os.close(ours)
    return child.returncode, shown.decode()
