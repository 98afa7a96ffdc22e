"""The interface of a measured server: a group of processes that can be stopped for a while and go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar

from benchmarks.serve_checkpoint import Checkpoint
from benchmarks.serve_client import Stream, ask_all

HOST = "127.0.0.1"
READY_SECONDS = 420
"""After which a server is given up: compiling may be part of it."""
STOP_SECONDS = 20
MODEL = "bench"
"""The name that every server serves the model by."""


class NotMeasured(Exception):
    """The reason why a system has no figure, in one line."""


class System(ABC):
    """One system with one kind of weights: `unavailable`, then `start`, `streams` any number of times, `stop`."""

    label: ClassVar[str] = ""

    def __init__(self, weights: str) -> None:
        """`weights`: bfloat16, float32 or q4_k."""
        self.weights = weights
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        short = {"bfloat16": "bf16", "float32": "f32", "q4_k": "Q4_K_M"}[self.weights]
        return f"{self.label} {short}"

    @abstractmethod
    def unavailable(self, checkpoint: Checkpoint) -> str | None:
        """The reason why it cannot be started here; None where it can."""

    @abstractmethod
    def version(self) -> str:
        """The version that is installed."""

    @abstractmethod
    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        """For up to `batch` requests at once of up to `length` tokens each, prompt and new ones."""

    @abstractmethod
    def streams(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
        """All prompts at once, each continued greedily by `new_tokens`; when what arrived."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self, checkpoint: Checkpoint, batch: int, length: int, log: Path) -> None:
        """Returns when it answers.

        Raises:
            NotMeasured: it is not installed, or it ended, or it does not answer.
        """
        why = self.unavailable(checkpoint)
        if why is not None:
            raise NotMeasured(why)
        self._port = free_port()
        self._log = log
        with log.open("wb") as file:
            self._process = self._open(self.command(checkpoint, self._port, batch, length), file)
        end = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                raise NotMeasured(f"exit status {self._process.returncode}: {last_line(log)}")
            if time.monotonic() > end:
                self.stop()
                raise NotMeasured(f"no answer after {READY_SECONDS} s: {last_line(log)}")
            time.sleep(0.2)

    def pause(self) -> None:
        """Stops its processes where they are: nothing of them runs, their memory stays."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it, whatever state it is in."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, seconds in ((signal.SIGCONT, 0), (signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _open(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """In a group of its own: what it starts is stopped with it."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
        )

    @abstractmethod
    def _ready(self) -> bool: ...

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class HttpServer(System):
    """A server of OpenAI's API; `GET /health` answers 200 once it can be asked."""

    def streams(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
        return ask_all(HOST, self._port, MODEL, prompts, new_tokens)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def last_line(log: Path) -> str:
    """Return what a server said last, in at most 160 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it said nothing"
