"""The middleware of the server: what it lets through and what it answers itself, around an application of its own."""

import asyncio
import json
from dataclasses import replace

import pytest

from paged_kv.errors import ContractError
from paged_kv.serve import middleware
from paged_kv.serve.access_rules import LOOPBACK, AccessRules
from paged_kv.serve.address import is_loopback, listening_sockets
from paged_kv.serve.middleware import MAX_DEPTH, Middleware, depth
from paged_kv.serve.origins import Origins
from paged_kv.serve.settings import API_KEY, Settings

KEY = "sk-secret"
RULES = AccessRules(KEY, LOOPBACK | {"served.example"}, max_body_bytes=1000)
SHAPE = {"message", "type", "param", "code"}
BODY = b'{"prompt": "x"}'


async def tokens(scope, receive, send):
    """An application that answers with the body it got."""
    assert scope["type"] == "http"
    got = await receive()
    assert got["type"] == "http.request"
    assert not got["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"token " + got["body"]})


def scope_of(path="/v1/completions", method="POST", host="localhost:8000", key=KEY, kind="application/json", **headers):
    given = {"host": host, "content-type": kind, "authorization": key and f"Bearer {key}"} | headers
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items() if value is not None]
    return {"type": "http", "method": method, "path": path, "headers": listed, "server": ("192.0.2.7", 8000)}


def ask(scope=None, pieces=(BODY,), rules=RULES, application=tokens, cancel_after=None):
    """The status, the headers and the body that the client sees; no status where there was no answer."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if messages:
        messages[-1]["more_body"] = False
    coming, sent = iter(messages), []

    async def receive():
        for message in coming:
            return message
        await asyncio.sleep(3600)  # neither more nor gone
        raise AssertionError

    async def send(message):
        sent.append(message)

    async def run():
        task = asyncio.ensure_future(Middleware(application, rules)(scope or scope_of(), receive, send))
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            task.cancel()
        async with asyncio.timeout(60):
            await task

    asyncio.run(run())
    status = sent[0]["status"] if sent else None
    headers = dict(sent[0]["headers"]) if sent else {}
    ended = sent and not sent[-1].get("more_body", False)
    assert ended or not sent or cancel_after is not None
    return status, headers, b"".join(message.get("body", b"") for message in sent[1:])


def error(body):
    said = json.loads(body)
    assert set(said) == {"error"}
    assert set(said["error"]) == SHAPE
    return said["error"]


def asked_twice(name, value):
    """A right request, but for one more header before its own."""
    scope = scope_of()
    return scope | {"headers": [(name, value), *scope["headers"]]}


PROBES = ("/health", "/v1/health", "/ping")
OPERATORS = (
    *("/metrics", "/metrics/", "//metrics", "/v1/../metrics", "/reset_prefix_cache", "/docs", "/openapi.json"),
    *("/start_profile", "/stop_profile", "/V1/models", "/v1", "/v1/load_lora_adapter", ""),
)
OPEN_RULES, OPERATORS_RULES = replace(RULES, key=None), replace(RULES, access=RULES.access | {"metrics"})
REQUESTS = [
    *((scope_of(), 200), (scope_of(host="127.0.0.1"), 200), (scope_of(host="[::1]:8000"), 200)),
    *((scope_of(host="LocalHost.:8000"), 200), (scope_of(host="served.example"), 200)),
    (scope_of(host="192.0.2.7:8000"), 200),  # the address that the connection reached
    *((scope_of(origin="http://localhost:3000"), 200), (scope_of(origin="https://served.example"), 200)),
    (scope_of(kind="application/json; charset=utf-8"), 200),
    (scope_of(key=None, authorization=f"bearer {KEY}"), 200),
    *((scope_of(path, "GET", key=None), 200) for path in PROBES),  # they are told nothing
    *((scope_of(path, "GET", key=None, host="rebound.example"), 403) for path in PROBES),
    *(
        (scope_of(host=host), 403)
        for host in (
            *("rebound.example:8000", "192.0.2.8", "localhost.rebound.example", "localhost@rebound.example", ""),
        )
    ),
    *((scope_of(host=None), 400), (asked_twice(b"host", b"localhost"), 400)),
    *(
        (scope_of(origin=origin), 403)
        for origin in ("http://page.example", "http://localhost.page.example", "null", "file://")
    ),
    *((scope_of(key=key), 401) for key in (None, KEY[:-1], KEY + "x", KEY.upper(), "")),
    *((scope_of(key=None, authorization=given), 401) for given in (KEY, f"Basic {KEY}", "Bearer \xfc")),
    (asked_twice(b"authorization", b"Bearer x"), 401),
    *((scope_of(key=None, path=path), 401) for path in ("/docs", "/version", "/pool")),  # nor learns what there is
    *((scope_of(kind=kind), 415) for kind in ("text/plain", None, "text/plain, application/json")),
    *((scope_of(path=path), 404) for path in OPERATORS),
    (scope_of(key=None), 200, OPEN_RULES),
    (scope_of(key=None, host="rebound.example"), 403, OPEN_RULES),
    (scope_of(key=None, path="/docs", method="GET"), 404, OPEN_RULES),
    (scope_of("/metrics"), 200, OPERATORS_RULES),
    (scope_of("/metrics", key=None), 401, OPERATORS_RULES),
    (scope_of("/v1/load_lora_adapter"), 200, replace(RULES, access=RULES.access | {"adapters"})),
    (scope_of("/docs"), 404, OPERATORS_RULES),
    (scope_of("/start_profile"), 404, OPERATORS_RULES),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_who_comes_through(request_):
    scope, status, rules = (*request_, RULES)[:3]
    found, _, body = ask(scope, rules=rules, application=tokens if status == 200 else None)
    assert found == status
    if status == 200:
        assert body == b"token " + BODY
    else:
        assert error(body)["code"] == {401: "invalid_api_key"}.get(status)


def test_the_body_is_not_read_before_the_key_is_right():
    async def receive():
        raise AssertionError("read")

    async def send(message):
        sent.append(message)

    sent = []
    asyncio.run(Middleware(None, RULES)(scope_of(key=None), receive, send))
    assert sent[0]["status"] == 401


DEEPEST = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH


@pytest.mark.parametrize(
    ("headers", "pieces", "status", "said"),
    [
        ({}, [b'{"pro', b"", b'mpt": "x"}'], 200, BODY.decode()),  # pieces come as one
        ({"content_length": "1000"}, [b"0" * 500] * 2, 200, ""),
        # Answered at once, and what still comes is dropped; nothing is read of who waits: `ask` would wait for ever.
        ({"content_length": "1001"}, [b"x" * 500] * 5, 413, "1000 bytes"),
        ({"transfer_encoding": "chunked"}, [b"x" * 500] * 5, 413, "1000 bytes"),
        ({"content_length": "1001", "expect": "100-continue"}, (), 413, "1000 bytes"),
        ({}, [DEEPEST], 200, ""),
        ({}, [b"[" + DEEPEST + b"]"], 400, str(MAX_DEPTH)),
        *(({}, ['["∀"]'.encode(encoding)], 400, "UTF-8") for encoding in ("utf-16", "utf-32-le")),  # no depth is seen
    ],
)
def test_what_a_body_may_be(monkeypatch, headers, pieces, status, said):
    monkeypatch.setattr(middleware, "LINGER_SECONDS", 3600)
    found, sent, body = ask(scope_of(**headers), pieces, application=tokens if status == 200 else None)
    assert found == status
    assert said in (body.decode() if status == 200 else error(body)["message"])
    assert (sent.get(b"connection") == b"close") == (status == 413)


def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(middleware, "LINGER_SECONDS", 0.05)
    status, headers, body = ask(scope_of(content_length="15"), (), application=None)
    assert (status, headers[b"connection"]) == (408, b"close")
    error(body)


def test_a_client_that_leaves_is_not_answered():
    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    asyncio.run(Middleware(None, RULES)(scope_of(), gone, send))


@pytest.mark.parametrize(
    ("body", "levels"), [(b"", 0), (b'"[[[[', 0), (b"]]]]", 0), (b"[" * 100_000, 100_000), (b"[]" * 100_000, 1)]
)
def test_the_depth_of_what_is_no_json_or_long(body, levels):
    assert depth(body) == levels


def test_the_depth_is_that_of_the_parsed_text():
    def deep(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    values = [[], {}, '"\\[{', [["]", {"}": '\\"'}]], {"[": [[{}, "\\\\"], "{["]}, 7]
    for one in values:
        for other in values:
            value = [one, {"\\": other}]
            assert depth(json.dumps(value).encode()) == deep(value)


def test_an_application_that_raises():
    async def raises(scope, receive, send):  # noqa: ARG001
        raise RuntimeError("a secret of the server")

    status, headers, body = ask(application=raises)
    assert status == 500
    assert headers[b"connection"] == b"close"
    assert "secret" not in error(body)["message"]


def test_a_request_that_is_cut_before_its_answer():
    async def waits(scope, receive, send):  # noqa: ARG001
        await asyncio.sleep(3600)

    status, headers, body = ask(application=waits, cancel_after=0.05)
    assert (status, headers[b"connection"]) == (503, b"close")
    assert error(body)["type"] == "api_error"


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/octet-stream"])
def test_a_stream_that_is_cut_ends_with_an_event(kind):
    async def streams(scope, receive, send):  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(3600)

    status, _, body = ask(application=streams, cancel_after=0.05)
    assert status == 200
    first, _, rest = body.partition(b"\n\n")
    assert first == b"data: 1"
    if kind.startswith(b"text/event-stream"):
        assert rest.endswith(b"\n\n")
        assert error(rest.removeprefix(b"data: "))["type"] == "api_error"
    else:
        assert rest == b""


def test_a_websocket_is_not_answered():
    asyncio.run(Middleware(None, RULES)({"type": "websocket"}, None, None))


PAGE = "https://app.example"
PAGES = replace(RULES, origins=Origins(frozenset({PAGE}), frozenset({"named.example"})))
ALLOW = b"access-control-allow-origin"


@pytest.mark.parametrize("origin", [PAGE, "http://named.example:3000"])
def test_a_page_that_is_named_reads_answers_and_errors(origin):
    for scope, status in ((scope_of(origin=origin), 200), (scope_of(origin=origin, key=None), 401)):
        answered, headers, _ = ask(scope, rules=PAGES, application=tokens if status == 200 else None)
        assert (answered, headers[ALLOW], headers[b"vary"]) == (status, origin.encode(), b"Origin")
        assert b"x-request-id" in headers[b"access-control-expose-headers"]


def test_a_browser_asks_before_a_page_does():
    asks = {"method": "OPTIONS", "key": None, "kind": None, "access_control_request_method": "POST"}
    asks["access_control_request_headers"] = "authorization,x-stainless-os"
    status, headers, body = ask(scope_of(origin=PAGE, **asks), (), PAGES, None)
    assert (status, body, headers[ALLOW]) == (204, b"", PAGE.encode())
    assert headers[b"access-control-allow-headers"] == b"authorization,x-stainless-os"
    assert b"POST" in headers[b"access-control-allow-methods"]
    for origin, rules in (("http://localhost:3000", PAGES), (PAGE, RULES), ("https://page.example", PAGES)):
        status, headers, _ = ask(scope_of(origin=origin, **asks), (), rules, None)
        assert status in (401, 403)
        assert ALLOW not in headers
    assert ask(scope_of(origin=PAGE, host="rebound.example", **asks), (), PAGES, None)[0] == 403


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://served.example", None])
def test_a_page_that_is_not_named_reads_nothing(origin):
    status, headers, _ = ask(scope_of(origin=origin), rules=PAGES)
    assert status == 200
    assert ALLOW not in headers


@pytest.mark.parametrize(
    ("number", "is_echoed"), [("a-client's", False), ("job:7/3", True), ("x" * 129, False), (None, False), ("", False)]
)
@pytest.mark.parametrize(("path", "names"), [("/v1/models", 1), ("/v1/messages", 2)])
def test_an_answer_has_its_requests_number(number, is_echoed, path, names):
    for scope in (scope_of(path, x_request_id=number), scope_of(path, x_request_id=number, key=None)):
        _, headers, _ = ask(scope)
        numbers = {headers[name] for name in (b"x-request-id", b"request-id")[:names]}
        assert len(numbers) == 1
        assert (numbers == {(number or "").encode()}) == is_echoed
        assert is_echoed or numbers.pop().startswith(b"req_")


# Who is let in at all.


def rules_of(settings):
    return settings.rules(max_length=1)


@pytest.fixture
def request_(tmp_path, monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    return Settings(tmp_path, "a model")


def test_without_a_key_only_this_machine_is_let_in(request_):
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert rules_of(replace(request_, host=host)).key is None
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert not is_loopback(host)
        with pytest.raises(ContractError, match=f"--host {host} lets other machines in"):
            rules_of(replace(request_, host=host))
        assert rules_of(replace(request_, host=host, allow_unauthenticated=True)).key is None
        assert rules_of(replace(request_, host=host, api_key="k")).key == "k"


def test_a_key_from_the_environment_or_a_file(request_, tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("of-a-file\n")
    assert rules_of(replace(request_, api_key_file=file)).key == "of-a-file"
    monkeypatch.setenv(API_KEY, "of-the-environment")
    assert rules_of(request_).key == "of-the-environment"
    with pytest.raises(ContractError, match=f"one of --api-key-file and {API_KEY}"):
        rules_of(replace(request_, api_key_file=file))


@pytest.mark.parametrize("key", ["", " ", "a b", "a\nb", "ü", "x" * 1025])
def test_a_key_that_no_header_could_hold(request_, key, monkeypatch, tmp_path):
    with pytest.raises(ContractError, match="the API key: expected 1 to"):
        rules_of(replace(request_, api_key=key))
    monkeypatch.setenv(API_KEY, key)  # an empty one is no server without a key
    with pytest.raises(ContractError, match="the API key: expected 1 to"):
        rules_of(request_)
    monkeypatch.delenv(API_KEY)
    file = tmp_path / "key"
    file.write_text(key)
    with pytest.raises(ContractError, match="the API key: expected 1 to"):
        rules_of(replace(request_, api_key_file=file))


@pytest.mark.parametrize("path", ["none", "."])
def test_a_key_file_that_is_none(request_, tmp_path, path):
    with pytest.raises(ContractError, match=r"--api-key-file .*: no such file"):
        rules_of(replace(request_, api_key_file=tmp_path / path))


def test_names_that_are_allowed(request_):
    rules = rules_of(replace(request_, host="Node7", api_key="k", allowed_hosts=("Models.example:8000", "2001:DB8::1")))
    assert rules.hosts == LOOPBACK | {"node7", "models.example", "2001:db8::1"}


def test_pages_of_other_servers_that_are_named(request_):
    named = replace(request_, allowed_hosts=("Models.example:8000",), allowed_origins=("https://App.example:443/",))
    origins = rules_of(named).origins
    allowed = ("https://app.example", "https://models.example", "http://models.example:3000")
    refused = (
        "http://app.example",
        "https://app.example:8443",
        "http://localhost:3000",
        "http://127.0.0.1",
        "null",
        "",
    )
    assert [origins.allows(each) for each in (*allowed, *refused)] == [True] * 3 + [False] * 6
    assert rules_of(request_).origins.is_empty
    several = "https://a.example, https://b.example"
    for wrong in ("*", "null", "app.example", "https://", "https://app.example/page", several):
        with pytest.raises(ContractError, match="--allowed-origin: expected SCHEME://HOST"):
            rules_of(replace(request_, allowed_origins=(wrong,)))


def test_a_key_is_not_in_the_requests_text(request_):
    assert KEY not in repr(replace(request_, api_key=KEY))


def test_the_longest_request_fits(request_):
    assert request_.rules(4096).max_body_bytes == 1 << 18
    assert request_.rules(131_072).max_body_bytes == 1 << 21
    assert replace(request_, max_body_bytes=5).rules(131_072).max_body_bytes == 5


# The port that is printed.


def test_a_port_that_was_bound_is_nobody_elses():
    (taken,) = listening_sockets("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ContractError, match="Address already in use"):  # SO_REUSEADDR included
            listening_sockets("127.0.0.1", port)
    listening_sockets("127.0.0.1", port)[0].close()


def test_all_addresses_of_a_name_have_one_port():
    bound = listening_sockets("localhost", 0)
    assert len({opened.getsockname()[1] for opened in bound}) == 1
    for opened in bound:
        opened.close()


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 65536, "--port: expected 0 to 65535"),
        ("127.0.0.1", -1, "--port: expected 0 to 65535"),
        ("127.0.0.1", 10**400, "--port: expected 0 to 65535"),
        ("192.0.2.1", 0, "--host 192.0.2.1 --port 0: "),
        ("nosuch.invalid", 0, "--host nosuch.invalid --port 0: "),
    ],
)
def test_an_address_that_cannot_be_bound(host, port, message):
    with pytest.raises(ContractError, match=message):
        listening_sockets(host, port)
