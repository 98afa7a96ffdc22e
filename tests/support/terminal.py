"""Runs the command line on a terminal of a given width, and talks to it there."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from contextlib import contextmanager

from support.limits import end_with_parent, limited
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


class Dialogue:
    """A command that reads from its terminal."""

    def __init__(self, ours, child):
        self._ours, self.child = ours, child
        self.shown = ""

    def send(self, text):
        r"""Types a text; `"\x03"` is Ctrl-C, `"\x04"` Ctrl-D."""
        os.write(self._ours, text.encode())

    def until(self, text, seconds=120, again=""):
        """What is shown up to and with a text, from where the last call ended; `again` is typed each second: Python
        misses a signal that comes between readline's prompt and its wait for a key.
        """
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._ours], [], [], 1)[0]:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            elif again:
                self.send(again)
        before, _, self.shown = self.shown.partition(text)
        return before + text


@contextmanager
def dialogue(arguments):
    """The command line with a terminal of its own, to which Ctrl-C goes."""
    ours, theirs = pty.openpty()

    def take_terminal():
        end_with_parent()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [*COMMAND, *map(str, arguments)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    child = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=take_terminal)
    with limited(child):
        os.close(theirs)
        try:
            yield Dialogue(ours, child)
        finally:
            os.close(ours)  # it hangs up
