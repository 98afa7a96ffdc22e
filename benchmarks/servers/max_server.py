"""MAX Serve: with its own architecture by `max serve`, and with paged-kv's by `paged-kv serve`.

Both run in the environment of the interpreter that runs the benchmark: pip install 'paged-kv[serve]'.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paged_kv.benchmarks.serve_checkpoint import Checkpoint
from paged_kv.benchmarks.servers.base import HOST, MODEL, HttpServer


class BuiltIn(HttpServer):
    """Its defaults, but for the sizes; on the CPU it takes no bfloat16."""

    label = "MAX Serve built-in"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:
        for module in ("max.serve", "uvicorn"):
            if find_spec(module) is None:
                return "not installed: max[serve]"
        return checkpoint.missing(self.weights)

    def version(self) -> str:
        return metadata.version("max")

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        folder = checkpoint.float32 if self.weights == "float32" else checkpoint.folder
        weights = ["--weight-path", str(checkpoint.q4_k)] if self.weights == "q4_k" else []
        return [
            *(sys.executable, "-m", "max._entrypoints.pipelines", "serve"),
            *("--model-path", str(folder), *weights, "--quantization-encoding", self.weights),
            *("--devices", "cpu", "--host", HOST, "--port", str(port), "--served-model-name", MODEL),
            *("--max-batch-size", str(batch), "--max-length", str(length), "--enable-prefix-caching"),
        ]

    def environment(self) -> dict[str, str]:
        scripts = str(Path(sys.executable).parent)  # MAX looks for its compiler there
        path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
        return {**os.environ, "PATH": path, "MAX_SERVE_DISABLE_TELEMETRY": "1"}


class Ours(BuiltIn):
    """`paged-kv serve`, with what it chooses by itself, but for the sizes."""

    label = "paged-kv serve"

    def version(self) -> str:
        return metadata.version("paged-kv")

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        model = checkpoint.q4_k if self.weights == "q4_k" else checkpoint.folder
        dtype = [] if self.weights == "q4_k" else ["--dtype", self.weights]
        return [
            *(sys.executable, "-c", "from paged_kv.cli import main; main()", "serve", str(model), *dtype),
            *("--host", HOST, "--port", str(port), "--max-batch-size", str(batch)),
            *("--", "--served-model-name", MODEL, "--max-length", str(length)),
        ]
