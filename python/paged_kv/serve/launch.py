"""`paged-kv serve`: checks the arguments, chooses defaults for the rest, then runs MAX's own server in this process.

MAX's server starts a process for the model; both leave when this one gets SIGINT or SIGTERM, as with `max serve`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from paged_kv.arguments import shown
from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.gguf_folder import model_folder
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.errors import CheckpointError, ContractError, ToolchainError
from paged_kv.runtime.cache_folder import cache_folder
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
COMPILED = "PAGED_KV_COMPILED"
"""The variable that hands `Request.compiled` to the model's process."""
_METRICS_PORT = "MAX_SERVE_METRICS_ENDPOINT_PORT"


@dataclass(frozen=True)
class Request:
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


def serve(request: Request) -> None:
    """Serves until a signal ends it.

    Raises:
        CheckpointError: the folder holds no model that this package runs.
        ContractError: an argument is bad, the port is taken, or the cache does not fit into memory.
        ToolchainError: the environment lacks what MAX's server needs, or the folder of compiled graphs cannot be used.
        OSError: stdout cannot be written when the server is ready.
    """
    check_environment()
    if request.compiled is not None:
        from paged_kv.runtime.artefacts import ahead_folder

        # The process of the model gets MAX's configuration, which has no room for this, and the environment.
        os.environ[COMPILED] = str(ahead_folder(request.compiled).path.resolve())
    from max._entrypoints.allocator import reexec_with_jemalloc
    from max._entrypoints.pipelines import main

    # MAX starts the `python3` that PATH has first for its own processes: it must be this one.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    reexec_with_jemalloc()  # this process starts again: MAX would do it in `main`, and what follows would run twice
    arguments, port = prepare(request)
    address = _address(request.host, port)
    os.environ.setdefault("MAX_SERVE_LOGS_ENABLE_COMPONENTS", "paged_kv")  # MAX's logs leave all others out
    os.environ.setdefault("OTEL_SDK_DISABLED", "true")  # MAX sends no telemetry to Modular then; /metrics stays
    metrics = os.environ.setdefault(_METRICS_PORT, str(_metrics_port(request.host, port)))
    folder = Path(_value(arguments, "--model-path") or request.folder)  # by this name the server knows the model
    lines = ready_lines(folder, address, _address(request.host, int(metrics)))
    announcement = Announcement(address, lines)
    try:
        threading.Thread(target=announcement.run, daemon=True).start()
        main(args=arguments, prog_name="paged-kv serve --", standalone_mode=False)
    finally:
        if announcement.error is not None:
            raise announcement.error


def prepare(request: Request) -> tuple[list[str], int]:
    """The arguments for MAX's entry point, and the port.

    Raises:
        CheckpointError, ContractError: as `serve`.
    """
    source = _checked(request)
    port = free_port(request.host, request.port)
    of_model = _model_arguments(request, source, lambda memory: memory.plan(request.page_size, free_memory()))
    return ["serve", "--host", request.host, "--port", str(port), *of_model], port


def arguments_ahead(request: Request) -> list[str]:
    """Those of MAX's `warm-cache`, which makes what the server would run and ends; address and port are not used.

    Raises:
        CheckpointError, ContractError: as `serve`.
    """
    return _model_arguments(request, _checked(request), lambda memory: memory.least(request.page_size))


def _checked(request: Request) -> Source:
    """The checkpoint of a request that can be served."""
    source = open_source(request.folder)
    if source.config.latent is not None:
        raise CheckpointError(
            f"{source.folder}: the pages of MAX Serve hold K and V of heads, not latents: run it with paged-kv generate"
        )
    for name in _names(request.flags) & _OURS.keys():
        raise ContractError(f"{name} cannot be handed on to MAX: {_OURS[name]}")
    if request.page_size < 1 or request.page_size % PAGE_SIZE:
        raise ContractError(f"--page-size must be a multiple of {PAGE_SIZE} (MAX's pool), not {request.page_size}")
    if not 1 <= request.max_batch_size < 2**31:
        problem = f"must be at least 1 and below 2^31, not {shown(request.max_batch_size)}"
        raise ContractError(f"--max-batch-size {problem}")
    return source


def _model_arguments(request: Request, source: Source, plan_of: Callable[[ServerMemory], CachePlan]) -> list[str]:
    """What MAX is told of the model and its cache: what was chosen for the user, and what the user chose."""
    given = _names(request.flags)
    gguf = source.checkpoint if isinstance(source.checkpoint, GgufCheckpoint) else None
    quantised = gguf.main_encoding if gguf else None
    encoding = _value(request.flags, "--quantization-encoding") or (quantised or request.dtype).lower()
    cache_format = _value(request.flags, "--kv-cache-format") or (request.dtype if quantised else None)
    plan = plan_of(ServerMemory.of(source.config, gguf.header.file if gguf else source.folder, encoding, cache_format))
    chosen = {
        "--quantization-encoding": encoding,
        "--max-length": str(plan.max_length),
        "--device-memory-utilization": f"{plan.utilization:.4f}",
        "--max-batch-input-tokens": str(max(CHUNK, request.max_batch_size)),
        "--enable-prefix-caching": None,
    }
    if gguf:
        chosen["--weight-path"] = str(gguf.header.file.resolve())
    if quantised:
        chosen["--kv-cache-format"] = cache_format
    folder = model_folder(gguf, cache_folder() / "gguf") if gguf else source.folder
    arguments = ["--model-path", str(folder), "--devices", "cpu", "--custom-architectures", "paged_kv.serve"]
    arguments += ["--max-batch-size", str(request.max_batch_size), "--kv-cache-page-size", str(request.page_size)]
    for name, value in chosen.items():
        if name not in given and name.replace("--enable", "--no-enable") not in given:
            arguments += [name] if value is None else [name, value]
    return [*arguments, *request.flags]


def check_environment() -> None:
    """Refuses an environment in which MAX's server would fail after a while, with many lines.

    Raises:
        ToolchainError: a dependency of `max[serve]` is missing, or has the wrong version.
    """
    try:
        wrong = list(_mismatches(metadata.requires("max") or ()))
    except ImportError:
        wrong = ["packaging is missing"]
    if wrong:
        listed = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ToolchainError(
            f"MAX's server cannot run in this environment: {listed}; make a new one and"
            " `pip install 'paged-kv[serve]'` there (the `test` extra wants another transformers)"
        )


def free_port(host: str, port: int) -> int:
    """`port`, or where it is 0 one that is free.

    Raises:
        ContractError: another program listens there, or this user may not, or `host` is no address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ContractError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ContractError(f"--host {host} --port {port}: {error.strerror or error}") from error


def ready_lines(folder: Path, address: str, metrics: str) -> str:
    """What to tell the user once the server answers: where it is, and a request that works."""
    prompt = "once a prompt is longer than a page"
    chat = _has_chat_template(folder)
    route = "chat/completions" if chat else "completions"
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({"model": str(folder)} | asked | {"max_tokens": 32, "temperature": 0})
    curl = f"curl {address}/v1/{route} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"paged-kv: ready on {address} (metrics: {metrics}/metrics)\n{curl}"


@dataclass
class Announcement:
    """What is printed when the server answers. A server that cannot say that it is ready leaves."""

    address: str
    lines: str
    error: OSError | None = None
    """Why it could not be printed."""

    def run(self) -> None:
        """Waits for the server, and prints."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    break
            except OSError:  # nothing listens yet
                time.sleep(0.1)
        try:
            print(self.lines, flush=True)
        except OSError as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGINT)


def _mismatches(requirements: Iterable[str]) -> Iterator[str]:
    """The dependencies of MAX's server that are missing or have the wrong version, in words."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "serve"}):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} is {installed}, it must be {requirement.specifier}"


def _metrics_port(host: str, port: int) -> int:
    """The port after the server's, where it is free; else any."""
    try:
        return free_port(host, port + 1)
    except ContractError:
        return free_port(host, 0)


def _address(host: str, port: int) -> str:
    """How a program on this machine reaches the server."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _has_chat_template(folder: Path) -> bool:
    """Whether transformers finds a chat template: MAX answers chats with 400 without one."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


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
