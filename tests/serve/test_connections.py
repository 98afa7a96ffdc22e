"""Connections of the guarded server, around an application of these tests: no model is served."""

import asyncio
import contextlib
import json
import select
import socket
import threading
import time

import pytest
from uvicorn import Config

from paged_kv.serve import connections
from paged_kv.serve.access_rules import AccessRules
from paged_kv.serve.address import listening_sockets
from paged_kv.serve.connections import HEAD_BYTES, GuardedServer

LIMIT = 8
WAIT = 30
"""Seconds that only a hang exceeds."""
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = b"GET /v1/models/large HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def application(scope, receive, send):  # noqa: ARG001
    """Answers at once, after a long time, or with more than a connection's buffers hold."""
    path = scope["path"]
    if path == "/v1/models":
        await asyncio.sleep(3600)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(1000 if path.endswith("large") else 1):
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.fixture
def server(monkeypatch):
    """The port of a server; limits of time are short."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    (bound,) = listening_sockets("127.0.0.1", 0)
    config = Config(application, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    started = GuardedServer(AccessRules(max_connections=LIMIT), [bound], config)
    thread = threading.Thread(target=lambda: asyncio.run(started.serve()))
    thread.start()
    end = time.monotonic() + WAIT
    while not started.started and time.monotonic() < end:
        time.sleep(0.01)
    started.port = bound.getsockname()[1]
    yield started
    started.should_exit = True
    thread.join(WAIT)
    assert not thread.is_alive()


def connect(server, sent=b""):
    opened = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    opened.sendall(sent)
    return opened


def rest(opened):
    """All that still comes, until the server closes."""
    got = b""
    with opened, contextlib.suppress(ConnectionResetError):
        while piece := opened.recv(1 << 16):
            got += piece
    return got


def status_of(answer):
    """The status of one answer, whose body is an error of OpenAI's shape unless it is 200."""
    top, _, body = answer.partition(b"\r\n\r\n")
    status = int(top.split()[1])
    if status != 200:
        assert set(json.loads(body)["error"]) == {"code", "message", "param", "type"}
    return status


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come(server, sent):
    assert status_of(rest(connect(server, sent))) == 408


def test_a_head_that_comes_byte_by_byte(server):
    begun = time.monotonic()
    with connect(server) as opened:
        with contextlib.suppress(OSError):
            for byte in GET[:-1] * 10:
                opened.sendall(bytes([byte]))
                time.sleep(0.02)
                if select.select([opened], [], [], 0)[0]:
                    break
        assert status_of(rest(opened)) == 408
    assert time.monotonic() - begun < WAIT / 2


def test_a_connection_that_says_nothing_is_closed_without_a_word(server):
    assert rest(connect(server)) == b""


@pytest.mark.slow
def test_the_second_head_of_a_connection_has_its_time_too(server):
    with connect(server, GET) as opened:
        assert opened.recv(1 << 16).startswith(b"HTTP/1.1 200")
        time.sleep(1)  # idle for longer than a head may take
        opened.sendall(b"GET /he")
        assert b"HTTP/1.1 408" in rest(opened)


def test_pipelined_requests_are_answered_in_turn(server):
    with connect(server, GET * 5 + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as opened:
        answers = rest(opened)
    assert answers.count(b"HTTP/1.1 200") == 5
    assert answers.count(b"HTTP/1.1 404") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00" + b"\x00" * 600,  # TLS
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"a" * (20 * HEAD_BYTES) + b"\r\n\r\n",
        b"GET /" + b"a" * (20 * HEAD_BYTES),
    ],
    ids=range(8),
)
def test_what_is_no_request(server, sent):
    """Also where the client still sends: a connection that is reset would lose the answer."""
    assert status_of(rest(connect(server, sent))) == 400
    assert status_of(rest(connect(server, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))) == 200


@pytest.mark.slow
def test_one_connection_too_many(server):
    """It is told so; where one of the others is idle, that one makes room."""
    busy = [connect(server, SLOW) for _ in range(LIMIT - 1)]
    idle = connect(server, GET)
    assert idle.recv(1 << 17).startswith(b"HTTP/1.1 200")
    time.sleep(0.2)
    served = connect(server, SLOW)
    assert b"HTTP/1.1" not in rest(idle)
    assert status_of(rest(connect(server, GET))) == 503
    served.close()
    time.sleep(0.2)
    with connect(server, GET) as opened:
        assert opened.recv(1 << 17).startswith(b"HTTP/1.1 200")
    for opened in busy:
        opened.close()


def test_a_client_that_does_not_read_is_left(server):
    with connect(server, LARGE) as opened:
        end = time.monotonic() + WAIT
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert not server.server_state.connections
        opened.recv(1)


@pytest.mark.slow
def test_what_the_servers_end_cuts_is_told_so(server):
    waiting, begun = connect(server, SLOW), connect(server, b"GET /v1/mod")
    time.sleep(0.2)
    server.should_exit = True
    assert status_of(rest(waiting)) == 503
    assert status_of(rest(begun)) == 503
