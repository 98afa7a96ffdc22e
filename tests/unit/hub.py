"""A hub on this machine that speaks enough of the protocol for `huggingface_hub`, over repositories in memory."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "gated/model"
"""A repository whose files nobody gets."""


class Hub:
    """A hub's address, its repositories, by name and file, and what it was asked for since `requests.clear()`."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.requests = list[str]()
        self.address = ""


@contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("api/models/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        files = self.hub.repositories.get(repository)
        if files is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository == GATED and "resolve" in rest:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("api/models/") and rest[:1] == ["tree"]:
            self._say([{"type": "file", "path": name, **_described(data)} for name, data in files.items()])
        elif path.startswith("api/models/"):
            siblings = [{"rfilename": name, **_described(data)} for name, data in files.items()]
            self._say({"id": repository, "sha": COMMIT, "siblings": siblings})
        elif rest[:1] == ["resolve"] and (name := "/".join(rest[2:])) in files:
            data = files[name]
            first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self._answer(206 if first else 200, data[first:], {"ETag": f'"{_etag(data)}"'})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _described(data: bytes) -> dict[str, object]:
    return {"size": len(data), "oid": _etag(data), "blobId": _etag(data)}
