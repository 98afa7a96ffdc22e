"""Streams completions from servers of OpenAI's API, and makes rates of when the tokens arrived.

The client shares the cores with the server, so it is as light as one can be: a blocking connection of the standard
library for each request; what arrives is stamped, and parsed after the last token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection

SECONDS = 900
"""For a line of an answer."""


@dataclass(frozen=True)
class Stream:
    """One request: when it was sent, and when each piece of its answer arrived (`time.perf_counter`)."""

    sent: float
    arrivals: list[float]
    tokens: int
    """Generated, as the server counts them."""


class WrongAnswer(Exception):
    """A server answered with an error, or with another number of tokens than it was asked for."""


def ask_all(host: str, port: int, model: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
    """All prompts at once, greedy, end-of-sequence tokens ignored.

    Raises:
        WrongAnswer: see there.
        OSError: the connection failed.
    """
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: _ask(host, port, model, prompt, new_tokens), prompts))


def _ask(host: str, port: int, model: str, prompt: Sequence[int], new_tokens: int) -> Stream:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    connection = HTTPConnection(host, port, timeout=SECONDS)
    try:
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise WrongAnswer(f"HTTP {answer.status}: {answer.read(300).decode(errors='replace')}")
        lines: list[tuple[float, bytes]] = []
        while line := answer.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter(), line))
    finally:
        connection.close()
    return parse(sent, lines, new_tokens)


def parse(sent: float, lines: Sequence[tuple[float, bytes]], new_tokens: int) -> Stream:
    """A stream of the lines of an answer, each with the time of its arrival."""
    arrivals, pieces, tokens = [], [], 0
    for when, line in lines:
        data = line.partition(b":")[2].strip()
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise WrongAnswer(str(event["error"])[:200])
        if event.get("choices"):
            pieces.append(when)
            if event["choices"][0].get("text"):  # none: half a character, or the end
                arrivals.append(when)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    if tokens != new_tokens:
        raise WrongAnswer(f"{tokens} tokens for {new_tokens}")
    return Stream(sent, arrivals or pieces, tokens)


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all requests together, while each of them was being answered.

    A piece may hold several tokens, and a token that is half a character comes with the next one, so each piece counts
    for its request's tokens over its pieces.

    Raises:
        WrongAnswer: the first answer ended before the last one began.
    """
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    if end <= begin:
        raise WrongAnswer("the requests were not answered together")
    inside = sum(
        sum(begin < when <= end for when in stream.arrivals) * stream.tokens / len(stream.arrivals)
        for stream in streams
    )
    return inside / (end - begin)


def first_token_seconds(streams: Sequence[Stream]) -> float:
    """From a request to the first piece of its answer, the mean over the requests."""
    return sum(stream.arrivals[0] - stream.sent for stream in streams) / len(streams)
