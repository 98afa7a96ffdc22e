"""A server with a key among rude clients, in turns with quiet, and how long others wait in either."""

import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import psutil

from support.guarded_server import Guarded
from support.rude_clients import Seen, misbehaved

CLIENTS = 4
QUIET_SECONDS, RUDE_SECONDS = 8.0, 25.0
"""Seconds of a turn: slow clients are closed after 10 and 20 seconds."""


@dataclass
class Soaked:
    """The measurements; times in seconds."""

    quiet: list[float] = field(default_factory=list)
    rude: list[float] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    failures: list[str] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    """Memory of the server's process, after each turn."""

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        slower = statistics.median(self.rude) / statistics.median(self.quiet)
        late = [f"others wait {slower:.2f} times as long as in quiet"] if slower > 2 else []
        return self.failures + self.seen.wrong + late


def soak(server: Guarded, seconds: float) -> Soaked:
    """`seconds` of rude clients, in turns."""
    soaked, seed = Soaked(), 0
    ask(server, CLIENTS, 2)  # what is made once
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(int).result(60)
        left = seconds
        while left > 0:
            turn, seed = min(RUDE_SECONDS, left), seed + 1
            soaked.quiet += ask(server, CLIENTS, min(QUIET_SECONDS, turn), soaked.failures)
            crowd = process.submit(misbehaved, server.port, server.key, turn, seed)
            soaked.rude += ask(server, CLIENTS, turn, soaked.failures)
            seen = crowd.result(turn + 120)
            soaked.seen.statuses += seen.statuses
            soaked.seen.wrong += seen.wrong
            soaked.megabytes.append(psutil.Process(server.process.pid).memory_info().rss / 1e6)
            left -= turn
    return soaked


def ask(server: Guarded, clients: int, seconds: float, failures: list[str] | None = None) -> list[float]:
    """The times of requests of so many clients, one after the other each."""
    times, end = [], time.monotonic() + seconds

    def client(index: int) -> None:
        count = 0
        while time.monotonic() < end:
            count += 1
            begun = time.monotonic()
            try:
                tokens = server.complete(f"client {index} asks {count}", max_tokens=16)["usage"]["completion_tokens"]
                if tokens != 16 and failures is not None:
                    failures.append(f"{tokens} tokens")
            except (OSError, ValueError) as error:
                if failures is not None:
                    failures.append(f"client {index}: {error}")
            times.append(time.monotonic() - begun)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 600)
    return times
