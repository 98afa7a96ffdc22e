"""The servers of OpenAI's API that are measured.

`paged-kv serve` and MAX Serve with its own architecture run in the environment of the interpreter that runs the
benchmark, MAX Serve where that has pip install 'paged-kv[max-serve]'. vLLM's server on the CPU is compiled as by
default; paged_kv/bench/peers/vllm_step.py says how to install it, and the variable. llama.cpp's, `llama-server`, reads
GGUF files of the same weights; it comes with releases of llama.cpp, or: cmake -B build -DGGML_NATIVE=ON && cmake
--build build -t llama-server -t llama-quantize. It is looked for by PAGED_KV_LLAMA_SERVER, a path, else by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from benchmarks.serve_checkpoint import LLAMA_SERVER, Checkpoint
from benchmarks.servers.base import HOST, MODEL, HttpServer
from paged_kv.bench.peers.vllm_step import environment, python, version
from paged_kv.runtime.cache_folder import cache_folder


class BuiltIn(HttpServer):
    """Its defaults, but for the sizes; on the CPU it takes no bfloat16."""

    label = "MAX Serve built-in"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:
        for module in ("max.serve", "sse_starlette"):
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


class Ours(HttpServer):
    """`paged-kv serve`, with what it chooses by itself, but for the sizes."""

    label = "paged-kv serve"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:
        return checkpoint.missing(self.weights)

    def version(self) -> str:
        return metadata.version("paged-kv")

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:
        model = checkpoint.q4_k if self.weights == "q4_k" else checkpoint.folder
        dtype = [] if self.weights == "q4_k" else ["--dtype", self.weights]
        return [
            *(sys.executable, "-c", "from paged_kv.cli import main; main()", "serve", str(model), *dtype),
            *("--host", HOST, "--port", str(port), "--name", MODEL),
            *("--max-running", str(batch), "--max-length", str(length)),
        ]


class Vllm(HttpServer):
    label = "vLLM CPU server"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:  # noqa: ARG002
        try:
            self._version = version("uvicorn")
        except ImportError as error:
            return f"not installed: {str(error)[:120]}"
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
        done = subprocess.run([str(self._program()), "--version"], capture_output=True, text=True)
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version:")]
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
