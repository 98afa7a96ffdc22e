"""A server of MAX Serve in a process of its own, on a free port of this machine, and what its metrics say."""

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.limits import end_with_parent

NEEDED = ("fastapi", "sse_starlette", "zmq", "openai", "transformers")
MAX_LENGTH = 512
"""Of a request of these servers, in tokens."""
SAMPLING = ("--enable-penalties", "--enable-min-tokens")
"""Of all servers: one set of flags is one sampler, which MAX compiles once."""
COMMON = ("--quantization-encoding", "float32", "--max-length", str(MAX_LENGTH), *SAMPLING)
PAGE_SIZE = 128
FEW_PAGES = 16
"""Of the strained server. MAX takes them of the memory that is free as it starts, so they may be 8 or 24."""

# Limits of what only a hang exceeds, also on a machine that is several times slower.
START_SECONDS = 1500  # a model that was compiled before takes 15, others up to 150
STOP_SECONDS = 120
IDLE_SECONDS = 240  # within which what was left of a test is computed, or dropped
ANSWER_SECONDS = 600
LOG_TAIL = 4000


def require() -> None:
    """Skips the calling module where MAX Serve, or the client of its API, is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the serving environment is not installed (no {', '.join(missing)})", allow_module_level=True)


@dataclass
class Server:
    """A server that answers."""

    url: str
    metrics_url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECONDS)

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        """The status and the decoded answer of a request that no client would make."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str) -> float:
        """The sum of a gauge's or counter's series; 0 where nothing was counted yet."""
        with urllib.request.urlopen(f"{self.metrics_url}/metrics", timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def used_pages(self) -> float:
        """Pages that some request holds, once the server is idle.

        MAX writes the gauge after a step, before it drops cancelled requests: one request more shows what is left.
        """
        client = self.client().with_options(max_retries=20)  # where the queue is still full
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            client.completions.create(model=self.model, prompt="x", max_tokens=1)
            used = self.metric("maxserve_cache_num_used_blocks")
            if not used or time.monotonic() > deadline:
                return used
            time.sleep(0.2)

    def stop(self) -> int:
        """Ends the server as a service manager does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def serving(folder: Path, log: Path, *flags: str, architectures: str = "paged_kv.serve") -> Iterator[Server]:
    """A server of the checkpoint in `folder` that has answered once; it is ended when the block is left."""
    port, metrics_port = free_ports()
    command = [sys.executable, "-m", "max._entrypoints.pipelines", "serve", "--devices", "cpu", "--port", str(port)]
    command += ["--model-path", str(folder), "--served-model-name", "demo", "--custom-architectures", architectures]
    environment = os.environ | {
        "MAX_SERVE_HOST": "127.0.0.1",
        "MAX_SERVE_METRICS_ENDPOINT_PORT": str(metrics_port),
        "OTEL_SDK_DISABLED": "true",  # sends nothing away; /metrics stays
        # MAX looks for the worker's Python on the PATH.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=output, env=environment, preexec_fn=end_with_parent
        )
    server = Server(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}", "demo", process, log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop()
        if process.poll() is None:
            process.kill()
            process.wait(STOP_SECONDS)


def memory_utilization(folder: Path, pages: int) -> float:
    """The value of `--device-memory-utilization` that leaves room for about `pages` pages of a float32 cache."""
    from max.driver import CPU

    config = json.loads((folder / "config.json").read_text())
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    # One page more: MAX keeps an empty one.
    wanted = (folder / "model.safetensors").stat().st_size + (pages + 1) * PAGE_SIZE * token
    return float(wanted / CPU().stats["free_memory"])


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.2)
    state = "not ready in time" if server.process.poll() is None else f"exit code {server.process.returncode}"
    raise AssertionError(f"the server did not start ({state}):\n{server.log_text()[-LOG_TAIL:]}")


def free_ports() -> tuple[int, int]:
    """Two free ports outside the range of ephemeral ports.

    Servers bind them up to minutes later: an ephemeral port might be a client's by then, or another server's.
    """
    dice, found = random.SystemRandom(), set[int]()
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while len(found) < 2:
        port = dice.randrange(10_000, first_given if first_given > 20_000 else 60_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    one, two = found
    return one, two
