"""Clients that behave badly, against a server with a key: none of them may get a token, and others still get theirs."""

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

RUDE, SLOW, LARGE = 64, 60, 30
LARGE_BYTES = 30_000_000
PAUSE = 0.25
"""Seconds between two requests of a rude client: without it, this machine's cores would be the clients' own."""
LARGE_PAUSE = 4.0
ANSWER_SECONDS = 60
SHAPE = {"code", "message", "param", "type"}


@dataclass
class Seen:
    """The answers that the rude clients got."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Tokens, and answers that are no errors of OpenAI's shape."""

    def note(self, who: str, status: int | None, body: bytes) -> None:
        """None: the connection was closed without an answer."""
        self.statuses[f"{who} {status or 'closed'}"] += 1
        if status is None:
            return
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = {}
        if status < 400 or set(error) != SHAPE:
            self.wrong.append(f"{who}: {status} {body[:200]!r}")


def head(path: str, length: int | None, *headers: str, method: str = "POST", host: str = "localhost") -> bytes:
    """The head of a request without a key."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(body: bytes, *headers: str, **others: str) -> bytes:
    return head(others.pop("path", "/v1/completions"), len(body), *headers, **others) + body


async def answer_of(port: int, sent: bytes, leaves: bool = False) -> tuple[int | None, bytes]:
    """Sends bytes, and reads one answer; None where there is none.

    Raises:
        TimeoutError: the server neither answers nor closes.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            with contextlib.suppress(ConnectionError):  # it may answer and close before all is sent
                writer.write(sent)
                await writer.drain()
                if leaves:
                    writer.write_eof()
            return await read_answer(reader)
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int | None, bytes]:
    """The status and the body of the next answer of a connection."""
    try:
        top = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", top)
        body = await (reader.readexactly(int(length[1])) if length else reader.read())
    except (asyncio.IncompleteReadError, ConnectionError):
        return None, b""
    return int(top.split()[1]), body


def rude_request(dice: random.Random, key: str) -> tuple[bytes, bool]:
    """A request that gets no token, and whether the client stops sending after it."""
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 64, "stream": dice.random() < 0.5}).encode()
    bearer = f"Authorization: Bearer {key}"
    requests = [
        post(body),
        post(body, f"Authorization: Bearer {key[:-1]}"),
        post(body, f"Authorization: Basic {key}"),
        post(body, bearer, host="rebound.example"),
        post(body, bearer, "Origin: http://page.example"),
        post(body, bearer).replace(b"application/json", b"text/plain"),
        post(body, bearer, path="/reset_prefix_cache"),
        head("/docs", None, bearer, method="GET"),
        head("/v1/models", None, method="GET"),
        post(body[:-5], bearer),
        post(b"[" * 100_000 + b"]" * 100_000, bearer),
        post(json.dumps({"model": "demo", "prompt": {}, "max_tokens": "many"}).encode(), bearer),
        post(b"\xff\xfe" + body, bearer),
        head("/v1/completions", None, bearer, "Transfer-Encoding: chunked") + b"zz\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        dice.randbytes(dice.randrange(1, 2000)) + b"\r\n\r\n",
    ]
    return dice.choice(requests), dice.random() < 0.1


async def be_rude(port: int, key: str, seen: Seen, dice: random.Random) -> None:
    sent, leaves = rude_request(dice, key)
    seen.note("rude", *await answer_of(port, sent, leaves))
    await asyncio.sleep(PAUSE * dice.uniform(0.5, 1.5))


async def be_slow(port: int, key: str, seen: Seen, dice: random.Random) -> None:
    """A byte a second: of a head, or of a body with a key."""
    sent = post(b"x" * 1000, f"Authorization: Bearer {key}")
    begun = 5 if dice.random() < 0.5 else len(sent) - 900
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.ensure_future(read_answer(reader))
    try:
        writer.write(sent[:begun])
        async with asyncio.timeout(ANSWER_SECONDS):
            for byte in sent[begun:]:
                done, _ = await asyncio.wait([answer], timeout=1)
                if done:
                    break
                writer.write(bytes([byte]))
            seen.note("slow", *await answer)
    finally:
        answer.cancel()
        writer.close()


async def be_large(port: int, key: str, seen: Seen, dice: random.Random, pause: float = LARGE_PAUSE) -> None:
    """More than a body may have, declared or in chunks."""
    bearer = f"Authorization: Bearer {key}"
    if dice.random() < 0.5:
        sent = post(b'{"prompt": "' + b"x" * LARGE_BYTES + b'"}', bearer)
    else:
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = head("/v1/completions", None, bearer, "Transfer-Encoding: chunked") + chunk * 20 + b"0\r\n\r\n"
    seen.note("large", *await answer_of(port, sent))
    await asyncio.sleep(pause * dice.uniform(0.5, 1.5))


async def misbehave(port: int, key: str, seconds: float, seed: int = 0) -> Seen:
    """All of them at once, for so long."""
    seen, end = Seen(), time.monotonic() + seconds

    async def repeat(job: Callable[..., Awaitable[None]], index: int) -> None:
        dice = random.Random(f"{seed} {job.__name__} {index}")
        await asyncio.sleep(dice.random())
        while time.monotonic() < end:
            try:
                await job(port, key, seen, dice)
            except TimeoutError:
                seen.wrong.append(f"{job.__name__}: neither answered nor closed")
            except ConnectionError:
                seen.statuses["no connection"] += 1

    crowd = [(be_rude, RUDE), (be_slow, SLOW), (be_large, LARGE)]
    jobs = [asyncio.ensure_future(repeat(job, index)) for job, count in crowd for index in range(count)]
    await asyncio.wait(jobs, timeout=seconds + 1)
    for job in jobs:
        job.cancel()
    for outcome in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return seen


def misbehaved(port: int, key: str, seconds: float, seed: int = 0) -> Seen:
    """`misbehave`, for a process of its own."""
    return asyncio.run(misbehave(port, key, seconds, seed))
