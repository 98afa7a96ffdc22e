"""llama.cpp's server, `llama-server`, on GGUF files of the same weights.

It comes with releases of llama.cpp, or: cmake -B build -DGGML_NATIVE=ON && cmake --build build -t llama-server -t
llama-quantize. It is looked for by PAGED_KV_LLAMA_SERVER, a path, else by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from paged_kv.benchmarks.serve_checkpoint import LLAMA_SERVER, Checkpoint
from paged_kv.benchmarks.servers.base import HOST, HttpServer


class LlamaServer(HttpServer):
    """A slot a request, flash attention on, its default cache (float16)."""

    label = "llama.cpp server"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:
        if self._program() is None:
            return f"not installed: llama-server ({LLAMA_SERVER})"
        if not checkpoint.bfloat16_gguf.exists():
            return "no GGUF file: pip install gguf"
        return checkpoint.missing(self.weights)

    def version(self) -> str:
        found = subprocess.run([str(self._program()), "--version"], capture_output=True, text=True)
        lines = [line for line in (found.stderr + found.stdout).splitlines() if line.startswith("version:")]
        return lines[0].removeprefix("version:").strip() if lines else "unknown"

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        file = checkpoint.q4_k if self.weights == "q4_k" else checkpoint.bfloat16_gguf
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return [
            *(str(self._program()), "--model", str(file), "--host", HOST, "--port", str(port)),
            *("--ctx-size", str(batch * length), "--parallel", str(batch), "--threads", str(threads)),
            *("--flash-attn", "on", "--cache-ram", "0"),  # slots keep their prompts; no copies of them besides
        ]

    @staticmethod
    def _program() -> str | None:
        return shutil.which(os.environ.get(LLAMA_SERVER) or "llama-server")
