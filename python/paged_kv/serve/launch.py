"""`paged-kv serve`: checks the arguments, chooses defaults for the rest, then runs MAX's own server in this process.

MAX's server starts a process for the model; both leave when this one gets SIGINT or SIGTERM, as with `max serve`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

from paged_kv.arguments import shown
from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.gguf_folder import model_folder
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.files import read_regular
from paged_kv.options import CODE_DTYPES
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.serve.address import held_sockets, is_loopback, listening_sockets, url_of
from paged_kv.serve.door import LOOPBACK, Rules, host_name
from paged_kv.serve.environment import check_environment, import_alone
from paged_kv.serve.memory import CachePlan, ServerMemory, free_memory

PAGE_SIZE = 128
"""MAX's pool has pages of a multiple of this."""
CHUNK = 512
"""Tokens of prompts in one step: requests that decode wait for it."""

_OURS = {
    "--model": "name DIR before the --",
    "--model-path": "name DIR before the --",
    "--host": "give it before the --",
    "--port": "give it before the --",
    "--max-batch-size": "give it before the --",
    "--kv-cache-page-size": "give --page-size before the --",
    "--custom-architectures": "run `max serve` itself",
    "--devices": "run `max serve` itself",
}
"""MAX's flags that may not be handed on, and what to do instead."""
API_KEY = "PAGED_KV_API_KEY"
MIN_BODY_BYTES = 1 << 18
BODY_BYTES_PER_TOKEN = 16
"""Of a request's body: text has some 4, a token's id in JSON up to 8, a character as \\uXXXX 6."""
COMPILED = "PAGED_KV_COMPILED"
"""The variable that hands `Serving.compiled` to the model's process."""
_LONGEST_KEY = 1024
_METRICS_PORT = "MAX_SERVE_METRICS_ENDPOINT_PORT"
_RECORDING = "MAX_SERVE_METRIC_RECORDING_METHOD"
"""With NOOP there are no metrics, and no process for them: the step of a small model takes 4 to 10 % less."""


@dataclass(frozen=True)
class Serving:
    """What the command line says."""

    folder: Path
    """Or a GGUF file."""
    host: str
    port: int
    """0: any that is free."""
    dtype: str
    max_batch_size: int
    page_size: int = PAGE_SIZE
    flags: tuple[str, ...] = ()
    """MAX's own, as they were given."""
    compiled: Path | None = None
    """A folder of graphs that were compiled ahead."""
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    operator_routes: bool = False
    metrics: bool = False
    max_body_bytes: int | None = None
    """None: `MIN_BODY_BYTES`, or more where the longest request needs more."""
    max_connections: int = 256


def serve(serving: Serving) -> None:
    """Serves until a signal ends it.

    Raises:
        CheckpointError: the folder holds no model that this package runs.
        ContractError: an argument is bad, the port is taken, or the cache does not fit into memory.
        ToolchainError: the environment lacks what MAX's server needs, or the folder of compiled graphs cannot be used.
        OSError: stdout cannot be written when the server is ready.
    """
    check_environment()
    rules = rules_of(serving)
    if serving.compiled is not None:
        from paged_kv.runtime.artefacts import ahead_store

        # The process of the model gets MAX's configuration, which has no room for this, and the environment.
        os.environ[COMPILED] = str(ahead_store(serving.compiled).path.resolve())
    from max._entrypoints.allocator import reexec_with_jemalloc
    from max._entrypoints.pipelines import main

    # MAX starts the `python3` that PATH has first for its own processes: it must be this one.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    reexec_with_jemalloc()  # this process starts again: MAX would do it in `main`, and what follows would run twice
    import_alone()
    from paged_kv.serve.connections import guard

    os.environ.pop(API_KEY, None)  # nothing that this process starts needs it
    arguments = prepare(serving)
    sockets = listening_sockets(serving.host, serving.port)  # from here on, the port is nobody else's
    port = int(sockets[0].getsockname()[1])
    address = url_of(serving.host, port)
    os.environ.setdefault("MAX_SERVE_LOGS_ENABLE_COMPONENTS", "paged_kv")  # MAX's logs leave all others out
    os.environ.setdefault("OTEL_SDK_DISABLED", "true")  # MAX sends no telemetry to Modular then; /metrics stays
    # MAX listens on this host for its metrics alone, which ask for no key.
    host = serving.host if serving.operator_routes else "127.0.0.1"
    metrics, held = None, []
    if os.environ.setdefault(_RECORDING, "PROCESS" if serving.metrics else "NOOP").upper() != "NOOP":
        held = [] if _METRICS_PORT in os.environ else held_sockets(host, port + 1)
        metrics = os.environ.setdefault(_METRICS_PORT, str(held[0].getsockname()[1]) if held else "")
    folder = Path(_value(arguments, "--model-path") or serving.folder)  # by this name the server knows the model
    lines = ready_lines(folder, address, rules.key is not None)
    announcement = Announcement(address, lines, metrics and f"{url_of(host, int(metrics))}/metrics")
    arguments = ["serve", "--host", host, "--port", str(port), *arguments]
    guard(replace(rules, max_body_bytes=_max_body_bytes(serving, arguments)), sockets)
    try:
        threading.Thread(target=announcement.run, daemon=True).start()
        main(args=arguments, prog_name="paged-kv serve --", standalone_mode=False)
    finally:
        if announcement.error is not None:
            raise announcement.error


def prepare(serving: Serving) -> list[str]:
    """The arguments for MAX's entry point, but for the address.

    Raises:
        CheckpointError, ContractError: as `serve`.
    """
    source = _checked(serving)
    return _model_arguments(serving, source, lambda memory: memory.plan(serving.page_size, free_memory()))


def rules_of(serving: Serving) -> Rules:
    """Who may ask this server, and how much at once.

    Raises:
        ContractError: the key cannot be used, or there is none and other machines reach the server.
    """
    key = _key(serving)
    if key is None and not serving.allow_unauthenticated and not is_loopback(serving.host):
        raise ContractError(
            f"--host {serving.host} lets other machines in: set {API_KEY} or --api-key-file,"
            " or --allow-unauthenticated where all of them may use the server"
        )
    for name, value in (("--max-body-bytes", serving.max_body_bytes), ("--max-connections", serving.max_connections)):
        if value is not None and not 1 <= value < 2**31:
            raise ContractError(f"{name} must be at least 1 and below 2^31, not {shown(value)}")
    hosts = LOOPBACK | {host_name(f"[{name}]" if name.count(":") > 1 else name) for name in serving.allowed_hosts}
    return Rules(key, hosts | {serving.host.lower()}, serving.operator_routes, max_connections=serving.max_connections)


def _key(serving: Serving) -> str | None:
    """The key that clients must send.

    Raises:
        ContractError: it cannot be read, or cannot stand in a header.
    """
    sources = {"--api-key": serving.api_key, "--api-key-file": serving.api_key_file, API_KEY: os.environ.get(API_KEY)}
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) > 1:
        raise ContractError(f"a key comes from one of {' and '.join(given)}, not from both")
    key = next(iter(given.values()), None)
    if isinstance(key, Path):
        if not key.is_file():
            raise ContractError(f"--api-key-file {key}: no such file")
        with key.open("rb") as opened:
            key = opened.read(_LONGEST_KEY + 2).decode("latin-1").strip()
    if key is not None and not (1 <= len(key) <= _LONGEST_KEY and all("!" <= letter <= "~" for letter in key)):
        raise ContractError(f"the API key must be 1 to {_LONGEST_KEY} visible ASCII characters without a space")
    return key


def _max_body_bytes(serving: Serving, arguments: Sequence[str]) -> int:
    length = _value(arguments, "--max-length") or ""
    of_length = BODY_BYTES_PER_TOKEN * int(length) if length.isdecimal() else 0
    return serving.max_body_bytes or max(MIN_BODY_BYTES, of_length)


def arguments_ahead(serving: Serving) -> list[str]:
    """Those of MAX's `warm-cache`, which makes what the server would run and ends; address and port are not used.

    Raises:
        CheckpointError, ContractError: as `serve`.
    """
    return _model_arguments(serving, _checked(serving), lambda memory: memory.least(serving.page_size))


def _checked(serving: Serving) -> Source:
    """The checkpoint, where all that the command line says can be served."""
    source = open_source(serving.folder)
    if source.config.latent is not None:
        raise CheckpointError(
            f"{source.folder}: the pages of MAX Serve hold K and V of heads, not latents: run it with paged-kv generate"
        )
    for name in _names(serving.flags) & _OURS.keys():
        raise ContractError(f"{name} cannot be handed on to MAX: {_OURS[name]}")
    if serving.page_size < 1 or serving.page_size % PAGE_SIZE:
        raise ContractError(f"--page-size must be a multiple of {PAGE_SIZE} (MAX's pool), not {serving.page_size}")
    if not 1 <= serving.max_batch_size < 2**31:
        problem = f"must be at least 1 and below 2^31, not {shown(serving.max_batch_size)}"
        raise ContractError(f"--max-batch-size {problem}")
    return source


def _model_arguments(serving: Serving, source: Source, plan_of: Callable[[ServerMemory], CachePlan]) -> list[str]:
    """What MAX is told of the model and its cache: what was chosen for the user, and what the user chose."""
    given = _names(serving.flags)
    gguf = source.checkpoint if isinstance(source.checkpoint, GgufCheckpoint) else None
    quantised = gguf.main_encoding if gguf else None
    encoding = _value(serving.flags, "--quantization-encoding") or _max_encoding(quantised or serving.dtype)
    cache_format = _value(serving.flags, "--kv-cache-format") or (serving.dtype if quantised else None)
    if cache_format in CODE_DTYPES:
        raise ContractError(
            f"--kv-cache-format {cache_format}: MAX allocates the server's pages and has none with scales;"
            f" `paged-kv generate --cache-dtype {cache_format}` has"
        )
    path, *more = gguf.header.parts if gguf else (source.folder,)
    plan = plan_of(ServerMemory.of(source.config, path, encoding, cache_format, more))
    chosen = {
        "--quantization-encoding": encoding,
        "--max-length": str(plan.max_length),
        "--device-memory-utilization": f"{plan.utilization:.4f}",
        "--max-batch-input-tokens": str(max(CHUNK, serving.max_batch_size)),
        "--enable-prefix-caching": None,
    }
    if gguf:
        # A link is not followed: parts are named after each other, and what a link leads to may have another name.
        chosen["--weight-path"] = str(gguf.header.file.absolute())
    if quantised:
        chosen["--kv-cache-format"] = cache_format
    folder = model_folder(gguf, cache_folder() / "gguf") if gguf else source.folder
    arguments = ["--model-path", str(folder), "--devices", "cpu", "--custom-architectures", "paged_kv.serve"]
    arguments += ["--max-batch-size", str(serving.max_batch_size), "--kv-cache-page-size", str(serving.page_size)]
    for name, value in chosen.items():
        if name not in given and name.replace("--enable", "--no-enable") not in given:
            arguments += [name] if value is None else [name, value]
    return [*arguments, *serving.flags]


def _max_encoding(encoding: str) -> str:
    """MAX's name of an encoding. It reads from it that weights are bytes and that activations are float32; of
    encodings that it lacks, which this package's step multiplies all the same, that of Q4_K says this too.
    """
    lacking = {"Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"}
    return "q4_k" if encoding in lacking else encoding.lower()


def ready_lines(folder: Path, address: str, asks_for_key: bool = False) -> str:
    """What to tell the user once the server answers: where it is, and a request that works."""
    prompt = "once a prompt is longer than a page"
    chat = bool(chat_template(folder))
    route = "chat/completions" if chat else "completions"
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({"model": str(folder)} | asked | {"max_tokens": 32, "temperature": 0})
    key = f' -H "Authorization: Bearer ${API_KEY}"' if asks_for_key else ""
    curl = f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    return f"paged-kv: ready on {address}\n{curl}"


@dataclass
class Announcement:
    """What is printed when the server answers. A server that cannot say that it is ready leaves."""

    address: str
    lines: str
    metrics: str | None
    """Named where it answers."""
    error: OSError | None = None
    """Why it could not be printed."""

    def run(self) -> None:
        """Waits for the server, and prints."""
        while not _answers(f"{self.address}/health"):
            time.sleep(0.1)
        ready, _, rest = self.lines.partition("\n")
        found = f" (metrics: {self.metrics})" if self.metrics and _answers(self.metrics) else ""
        try:
            print(f"{ready}{found}\n{rest}", flush=True)
        except OSError as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGINT)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, HTTPException):  # nothing listens there, or another program
        return False


def chat_template(folder: Path) -> str:
    """The chat template that transformers finds, or several of them as JSON; MAX answers chats with 400 without one."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_regular(folder / "chat_template.jinja").decode(errors="replace")
        found = json.loads(read_regular(folder / "tokenizer_config.json")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else json.dumps(found) if found else ""


def _names(flags: Sequence[str]) -> set[str]:
    return {flag.partition("=")[0] for flag in flags if flag.startswith("--")}


def _value(flags: Sequence[str], name: str) -> str | None:
    """The value of one of MAX's flags, as `--name value` or `--name=value`."""
    found = None
    for flag, following in pairwise([*flags, ""]):
        if flag == name:
            found = following
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found
