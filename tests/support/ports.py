"""Ports for servers that bind them later."""

import contextlib
import random
import socket
from pathlib import Path


def free_ports() -> tuple[int, int]:
    """Two free ports outside the range of ephemeral ports.

    Servers bind them up to minutes later: an ephemeral port might be a client's by then, or another server's.
    """
    dice, found = random.SystemRandom(), set[int]()
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while len(found) < 2:
        port = dice.randrange(10_000, first_given if first_given > 20_000 else 60_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    one, two = found
    return one, two
