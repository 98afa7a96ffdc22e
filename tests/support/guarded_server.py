"""`paged-kv serve` with a key, in a process of its own, started as a user starts it."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.limits import end_with_parent, limited

KEY = "sk-a-key-of-the-tests"

# Limits of what only a hang exceeds, also on a machine that is several times slower.
START_SECONDS = 600  # a step that was compiled before takes 2
STOP_SECONDS = 120
ANSWER_SECONDS = 300
LOG_TAIL = 4000


@dataclass
class Guarded:
    """A server that answers those who have the key."""

    port: int
    ready: str
    """The line that says so."""
    process: subprocess.Popen[str]
    log: Path
    key: str = KEY

    def complete(self, prompt: str, path: str = "/v1/completions", **options: Any) -> Any:
        """The decoded answer of a request with the key."""
        body = json.dumps({"model": "demo", "prompt": prompt, "temperature": 0} | options).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def guarded(folder: Path, *flags: str, model: str = "--demo", key: str = KEY) -> Iterator[Guarded]:
    """A server that has said that it is ready; `folder` gets its log. Without a key it asks for none."""
    command = [str(Path(sys.executable).with_name("paged-kv")), "serve", model, "--name", "demo", "--port", "0", *flags]
    environment = os.environ | ({"PAGED_KV_API_KEY": key} if key else {})
    log = folder / "log"
    with log.open("wb") as stderr:
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, preexec_fn=end_with_parent
        )
    with limited(started, 2 * START_SECONDS) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("paged-kv: ready on http://127.0.0.1:"), log.read_text()[-LOG_TAIL:]
            yield Guarded(int(ready.split()[3].rpartition(":")[2]), ready, process, log, key)
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)
