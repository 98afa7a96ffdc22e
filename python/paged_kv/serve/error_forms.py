"""The forms of errors: OpenAI's, and Anthropic's on its routes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ANTHROPIC_VERSION = "anthropic-version"
"""A header that Anthropic's clients send."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class ErrorForm:
    """The form of an API's errors."""

    event: bytes = b""
    """The line before an error's data in a stream of events."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """The headers of an answer that hold the request's id."""

    def error(self, status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        """An error as an object; `param` is the field at fault, `code` by default that of the status, if it has one."""
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        if self is ANTHROPIC:
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}

    def body(self, status: int, message: str) -> bytes:
        """An error as JSON."""
        return json.dumps(self.error(status, message)).encode()

    def in_stream(self, error: dict[str, Any]) -> bytes:
        """An error as an event of a stream."""
        return self.event + b"data: " + json.dumps(error).encode() + b"\n\n"


OPENAI = ErrorForm()
RESPONSES = ErrorForm(b"event: error\n")
"""OpenAI's, in streams whose events have names."""
ANTHROPIC = ErrorForm(b"event: error\n", (b"x-request-id", b"request-id"))
