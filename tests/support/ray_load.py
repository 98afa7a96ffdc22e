"""Clients of an application on Ray, what its replicas say of themselves, and what ends them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from ray import serve

from paged_kv.ray import app

SECONDS = 300.0
"""For any wait, on a machine that does other things too."""


@dataclass
class Reply:
    """The part of a stream that a client got."""

    text: str = ""
    error: str | None = None
    """The message of an event or an answer that is an error."""
    status: int = 0
    whole: bool = False
    """True if it ended as a stream ends."""
    first: float = 0.0
    """Seconds until the first text."""
    seconds: float = 0.0


class App:
    """The application of the demo's model."""

    def __init__(self, port: int, **arguments: Any) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.replicas = arguments.get("replicas", 1)
        began = time.monotonic()
        serve.run(app({"model": "demo", "drain_seconds": 120, **arguments}), name="app")
        self._handle = serve.get_deployment_handle("Replica", "app")
        self.start_seconds = time.monotonic() - began
        """Until its replicas were there."""
        while httpx.get(self.url + "/health", timeout=SECONDS).status_code != 200:  # Ray's proxy knows no route yet
            assert time.monotonic() - began < SECONDS
            time.sleep(0.05)

    def ask(self, prompt: str | Sequence[int], **options: Any) -> Reply:
        """Streams one request, greedy where nothing else is said."""
        body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": True, "ignore_eos": True} | options
        reply, began = Reply(), time.perf_counter()
        url = f"{self.url}/completions"
        with (
            suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", url, json=body, timeout=SECONDS) as response,
        ):
            reply.status = response.status_code
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    reply.whole = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        reply.error = event["error"]["message"]
                    for choice in event.get("choices", ()):
                        reply.first = reply.first or time.perf_counter() - began
                        reply.text += choice["text"]
                elif line:
                    reply.error = line
        reply.seconds = time.perf_counter() - began
        return reply

    def ask_all(self, prompts: Sequence[Any], at_once: int, **options: Any) -> list[Reply]:
        """As `ask`, so many at once; in the order of the prompts."""
        with ThreadPoolExecutor(at_once) as clients:
            return list(clients.map(lambda prompt: self.ask(prompt, **options), prompts))

    def status(self, seconds: float = SECONDS) -> dict[int, dict[str, Any]]:
        """Return what each of the replicas says, by process; waits until all are there."""
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(found) < self.replicas:
            assert time.monotonic() < end, f"{len(found)} of {self.replicas} replicas answered in {seconds} s"
            with suppress(Exception):  # one that has just been killed
                said = self._handle.status.remote().result(timeout_s=10)
                found[said["pid"]] = said
            found = {pid: said for pid, said in found.items() if os.path.exists(f"/proc/{pid}")}
        return found

    def idle(self) -> dict[int, dict[str, Any]]:
        """Their status once none of them has a request any more."""
        end = time.monotonic() + SECONDS
        while True:
            found = self.status()
            if not any(said["running"] or said["waiting"] for said in found.values()):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.1)


class Killer(threading.Thread):
    """Ends replicas at random moments, so many times in all; each time all of them are there first."""

    def __init__(self, target: App, kills: int, seed: int, most_seconds: float) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.back: list[float] = []
        """Seconds after each kill until as many replicas answered as before."""
        self.error: BaseException | None = None
        self._target, self._kills, self._most = target, kills, most_seconds
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            there = self._target.status()
            while len(self.back) < self._kills and not self.stop.wait(self._random.uniform(0.1, self._most)):
                began = time.monotonic()
                os.kill(self._random.choice(sorted(there)), signal.SIGKILL)
                there = self._target.status()
                self.back.append(time.monotonic() - began)
        except BaseException as error:  # the test looks
            self.error = error


def right_texts(engine: Any, prompts: Sequence[Any], sampling: Any) -> list[str]:
    """The texts of the engine alone."""
    numbers = [engine.add_request(prompt, sampling) for prompt in prompts]
    texts = dict.fromkeys(numbers, "")
    while not engine.is_idle:
        for output in engine.step():
            texts[output.request] += output.text
    return [texts[number] for number in numbers]
