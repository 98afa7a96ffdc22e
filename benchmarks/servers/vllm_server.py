"""vLLM's server on the CPU, compiled as by default; peers/vllm_step.py says how to install it, and the variable."""

from __future__ import annotations

import os
import subprocess

from paged_kv.benchmarks.peers.vllm_step import environment, python
from paged_kv.benchmarks.serve_checkpoint import Checkpoint
from paged_kv.benchmarks.servers.base import HOST, MODEL, HttpServer
from paged_kv.runtime.cache_folder import cache_folder


class Vllm(HttpServer):
    label = "vLLM CPU server"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:  # noqa: ARG002
        command = [python(), "-c", "import vllm, vllm._C, uvicorn; print(vllm.__version__)"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            return f"not installed: {found.stderr.strip().splitlines()[-1][:120]}"
        self._version = found.stdout.strip().splitlines()[-1]
        return None

    def version(self) -> str:
        return self._version

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        return [
            *(python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint.folder)),
            *("--served-model-name", MODEL, "--host", HOST, "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(length), "--max-num-seqs", str(batch), "--generation-config", "vllm"),
        ]

    def environment(self) -> dict[str, str]:
        """Threads are left to vLLM, which keeps a core free for its API: on two cores 100 tokens/s, and 21 with both.

        (100 M parameters, one request, 2-core Zen 5, 2026-11-22.)
        """
        settings = environment(python(), cache_folder() / "vllm")
        chosen = {name for name in settings.keys() - os.environ.keys() if name.startswith(("OMP_", "KMP_"))}
        for name in (*chosen, "VLLM_CPU_OMP_THREADS_BIND"):
            del settings[name]
        return {**settings, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
