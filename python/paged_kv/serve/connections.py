"""uvicorn with limits on connections, on sockets that are bound before anything is compiled."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_kv.serve.access_rules import AccessRules
from paged_kv.serve.error_forms import OPENAI
from paged_kv.serve.middleware import LINGER_SECONDS, Middleware

HEAD_SECONDS = 10.0
"""Limit for the arrival of a request's line and headers."""
HEAD_BYTES = 1 << 15
CUT_SECONDS = 5.0
"""Time for requests cut off by the shutdown to get their 503."""
WRITE_SECONDS = 60.0
"""Limit for a client to read some of the pending output."""


class GuardedServer(Server):
    """uvicorn's server, with the protocol below and the middleware around its application.

    Args:
        rules: Who may ask, and how much.
        sockets: Bound ones, on which it listens.
        config: uvicorn's.
    """

    def __init__(self, rules: AccessRules, sockets: Sequence[socket.socket], config: Config) -> None:
        config.app = Middleware(config.app, rules)
        config.http = partial(GuardedConnection, rules.max_connections)
        config.ws = "none"
        config.h11_max_incomplete_event_size = HEAD_BYTES
        super().__init__(config)
        self._bound = list(sockets)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        for bound in self._bound:
            bound.listen(self.config.backlog)
            # Connections inherit it: the next server may bind while some of this one wait out their end. No other
            # program may bind meanwhile, as this socket listens.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().serve(self._bound)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # those that were cut still say so
            await asyncio.wait(self.server_state.tasks, timeout=CUT_SECONDS)


class GuardedConnection(H11Protocol):
    """One connection, with time limits for its heads and its reads; refusals have OpenAI's form.

    A refused connection is closed for writing and read on for a while: the system would reset one with unread bytes,
    and the client would lose the answer.
    """

    def __init__(self, limit: int, *others: Any, **named: Any) -> None:
        super().__init__(*others, **named)
        self._limit = limit
        self._refused = False
        self._idle_since: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        if len(self.connections) > self._limit and not self._makes_room():
            if len(self.connections) > 2 * self._limit:
                transport.abort()
            else:
                self._refuse(503, f"all {self._limit} connections are in use; --max-connections sets the limit")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._idle_since = None
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._cancel_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:  # of the next request
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self._head_timer is None:
            self._idle_since = time.monotonic()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def shutdown(self) -> None:
        if self._refused:
            self.transport.close()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(503, "The server is being stopped.")
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _makes_room(self) -> bool:
        """Closes the connection that has been idle longest, of those that had a request."""
        idle = [
            other for other in self.connections if other is not self and other.cycle and other._idle_since is not None
        ]
        if idle:
            min(idle, key=lambda other: other._idle_since).transport.close()
        return bool(idle)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request: expected all of it within {HEAD_SECONDS:.0f} seconds")
        else:
            self.transport.close()  # it never began one

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application, and reads no more."""
        self._refused = True
        self._cancel_timers()
        begun = self.conn.our_state is h11.SEND_BODY
        if self.cycle is not None and not self.cycle.response_complete:  # it waits for a body that will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun or self.transport.is_closing():
            self.transport.close()
            return
        body = OPENAI.body(status, message)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _cancel_timers(self) -> None:
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
