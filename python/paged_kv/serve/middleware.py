"""The middleware around the application: which requests come through to it, in this order.

    connection  one too many: the longest idle one is closed, else 503    connections.py
       |        its head is malformed or too long: 400; too slow: 408     connections.py
    Host        not this server's name: 403 (a name that an attacker's DNS leads here)
    Origin      of a page that is not this server's, and that --allowed-origin does not name: 403
       |        a browser that asks whether such a page may send a request: answered here    origins.py
    key         none, or a wrong one: 401 (not for open routes)
    route       an operator's, or none: 404
    type        a body that is not application/json: 415
    body        too large: 413; too slow: 408; nested too deeply: 400
       |
    application requests cut off by the shutdown get 503

The body is read only after all checks above it have passed; the application sees no refused request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from hashlib import sha256
from ipaddress import ip_address

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_kv.serve.access_rules import AccessRules, host_name
from paged_kv.serve.error_forms import ErrorForm
from paged_kv.serve.routes import error_form, route_at

logger = logging.getLogger("paged_kv.serve")

MAX_DEPTH = 64
"""The deepest nesting of arrays and objects; JSON schemas of tools have some 20, and Python's parser gives up at
1000.
"""
BODY_SECONDS = 20.0
"""Limit for the arrival of a whole body."""
LINGER_SECONDS = 10.0
"""For how long a refused body is read on and dropped: a client that sends first and reads later gets its answer."""
_DROPS = 8
"""Refused bodies that are dropped at a time."""

_NUMBER = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class Refused(Exception):
    """An answer to a request that goes no further."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def depth(body: bytes) -> int:
    """Return how deeply arrays and objects of a JSON text are nested: no loop of Python's over its bytes.

    Text that is not JSON gives any number from 0 on.
    """
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of strings
    steps = outside.translate(_BRACKETS, _NO_BRACKETS)
    return max(0, int(np.cumsum(np.frombuffer(steps, np.int8), dtype=np.int32).max(initial=0)))


class Middleware:
    """An ASGI application around another one."""

    def __init__(self, application: ASGIApp, rules: AccessRules) -> None:
        self._application = application
        self._rules = rules
        self._key = None if rules.key is None else sha256(rules.key.encode()).digest()
        self._drops = asyncio.Semaphore(_DROPS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # Ray's server sends its start and end
            await self._application(scope, receive, send)
        if scope["type"] != "http":  # the application knows no WebSockets
            return
        headers, rules = scope["headers"], self._rules
        origins = _values(headers, b"origin")
        number = request_number(_values(headers, b"x-request-id"))
        also = rules.origins.headers(origins[0] if len(origins) == 1 else None)
        answer = _Answer(send, error_form(scope["path"], Headers(raw=headers)), number, also)
        body = _Body(scope, receive)
        try:
            self._check_page(scope, origins)
            if scope["method"] == "OPTIONS" and len(origins) == 1 and rules.origins.allows(origins[0]):
                requested = ",".join(_values(headers, b"access-control-request-headers")).encode("latin-1")
                await answer.empty(rules.origins.preflight(requested))
                return
            self._check(scope)
            await body.read(self._rules.max_body_bytes)
            await self._application(scope, body.again, answer.send)
        except Refused as refused:
            await self._refuse(refused, body, answer)
        except _Gone:
            pass
        except asyncio.CancelledError:  # uvicorn's, once the time is up in which running requests may end
            await answer.fail(503, "The server was stopped before this request was done.")
        except Exception:
            logger.exception("%s %s (request %s)", scope["method"], scope["path"], number)
            await answer.fail(500, "Internal server error.")

    def _check_page(self, scope: Scope, origins: Sequence[str]) -> None:
        """The server that is asked, and the pages that ask it. Raises Refused."""
        rules = self._rules
        named = _values(scope["headers"], b"host")
        if len(named) != 1:
            raise Refused(400, f"Host: expected one header, got {len(named)}")
        if host_name(named[0]) not in rules.hosts and not _is_own_address(host_name(named[0]), scope.get("server")):
            raise Refused(403, "Host: not a name of this server; --allowed-host adds one")
        for origin in origins:
            if host_name(origin.partition("://")[2]) not in rules.hosts and not rules.origins.allows(origin):
                raise Refused(403, "Origin: pages of it may not ask this server; --allowed-origin allows them")

    def _check(self, scope: Scope) -> None:
        """All else that needs no body. Raises Refused."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        route = route_at(scope["path"])
        if (route is None or route.access != "open") and not self._has_key(headers):
            raise Refused(401, "Authorization: expected Bearer and the key of this server")
        if route is None or route.access not in self._rules.access:
            raise Refused(404, "no such route")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kinds = [value.partition(";")[0].strip().lower() for value in _values(headers, b"content-type")]
            if kinds != ["application/json"]:
                raise Refused(415, "Content-Type: expected application/json")

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if self._key is None:
            return True
        asked = _values(headers, b"authorization") or [f"Bearer {each}" for each in _values(headers, b"x-api-key")]
        scheme, _, key = (asked or [""])[0].partition(" ")
        digest = sha256(key.strip().encode("latin-1")).digest()  # of one length, so comparing leaks none
        return hmac.compare_digest(digest, self._key) and scheme.lower() == "bearer"

    async def _refuse(self, refused: Refused, body: _Body, answer: _Answer) -> None:
        """Answers at once; the connection stays as long as the client still sends, for a while."""
        if not body.unread:
            await answer.whole(refused.status, str(refused))
            return
        await answer.whole(refused.status, str(refused), closes=True, more=True)
        if not body.waits:
            try:
                async with asyncio.timeout(LINGER_SECONDS), self._drops:
                    await body.drop()
            except TimeoutError:
                pass
        await answer.end()


class _Gone(Exception):
    """The client has left."""


class _Body:
    """The body of a request, which is read whole before the application sees anything."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        lengths = _values(scope["headers"], b"content-length")
        self._declared = int(lengths[0]) if lengths and lengths[0].isdecimal() else 0  # h11 has looked at it
        self.unread = self._declared > 0 or bool(_values(scope["headers"], b"transfer-encoding"))
        """True if the client may still be sending."""
        self.waits = b"100-continue" in dict(scope["headers"]).get(b"expect", b"").lower()
        """True if it sends only after `100 Continue`."""
        self._receive = receive
        self._content: bytes | None = b""

    async def read(self, limit: int) -> None:
        """Reads all of it.

        Raises:
            Refused: it is larger than `limit` bytes, took too long, or is nested too deeply.
            _Gone: the client has left.
        """
        too_large = Refused(413, f"the body: expected at most {limit} bytes, got more; --max-body-bytes sets the limit")
        if self._declared > limit:
            raise too_large
        pieces, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                self.unread = True
                while self.unread:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    self.unread = message.get("more_body", False)
                    if size > limit:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"the body: expected all of it within {BODY_SECONDS:.0f} seconds") from None
        self._content = b"".join(pieces)
        if b"\0" in self._content:  # UTF-16 and UTF-32, which Python's parser would read
            raise Refused(400, "the body: expected UTF-8 without NUL")
        if depth(self._content) > MAX_DEPTH:
            raise Refused(400, f"the body: expected arrays and objects at most {MAX_DEPTH} deep, got deeper ones")

    async def again(self) -> Message:
        """ASGI's `receive`: the body, then what comes after it."""
        if self._content is None:
            return await self._receive()
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def drop(self) -> None:
        """Reads on to the end, and keeps nothing; other requests have their turn between any two pieces."""
        while (await self._receive()).get("more_body", False):
            await asyncio.sleep(0.001)


class _Answer:
    """ASGI's `send`, which knows how far the answer has come, and adds headers to it.

    Args:
        send: The server's.
        errors: The form of errors.
        number: The request's.
        headers: Further headers.
    """

    def __init__(self, send: Send, errors: ErrorForm, number: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send, self._errors = send, errors
        self._headers = [*((name, number.encode()) for name in errors.id_headers), *headers]
        self._started = self._ended = self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            kinds = _values(message.get("headers", ()), b"content-type")
            self._is_stream = any(kind.startswith("text/event-stream") for kind in kinds)
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        else:
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def whole(self, status: int, message: str, closes: bool = False, more: bool = False) -> None:
        """An error of the middleware. With `more`, `end` is still to come."""
        self._started, self._ended = True, not more
        body = self._errors.body(status, message)
        sent = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        sent += [(b"www-authenticate", b"Bearer")] if status == 401 else []
        sent += [(b"connection", b"close")] if closes else []
        await self._send({"type": "http.response.start", "status": status, "headers": [*sent, *self._headers]})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def empty(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """An answer without a body."""
        self._started = self._ended = True
        sent = [*headers, *self._headers]
        await self._send({"type": "http.response.start", "status": 204, "headers": sent})
        await self._send({"type": "http.response.body", "body": b""})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, status: int, message: str) -> None:
        """End an unfinished request with an error, or with an error event where a stream has begun.

        Any other answer that has begun is left unfinished: uvicorn then closes the connection.
        """
        if not self._started:
            await self.whole(status, message, closes=True)
        elif self._is_stream and not self._ended:
            event = self._errors.in_stream(self._errors.error(status, message))
            await self._send({"type": "http.response.body", "body": event})


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def request_number(named: Sequence[str]) -> str:
    """The client's own number of a request, where it names one that can stand in a log, else a new one."""
    return named[0] if len(named) == 1 and _NUMBER.fullmatch(named[0]) else f"req_{secrets.token_hex(12)}"


def _is_own_address(name: str, server: tuple[str, int | None] | None) -> bool:
    """Return whether a Host header is the IP address of the connection: unlike a name, DNS cannot rebind it."""
    try:
        return server is not None and ip_address(name) == ip_address(server[0])
    except ValueError:
        return False
