"""llama.cpp on the same weights, written once as a GGUF file in bfloat16 or in blocks, with a bfloat16 cache."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.bench.model_files import write_gguf
from paged_kv.bench.peer import Peer
from paged_kv.bench.problems import Array, Problem
from paged_kv.bench.steps import StepProblem


class LlamaCppStep(Peer):
    """`llama_decode` on all cores, flash attention on.

    Its cache cannot be filled from outside, so every request has the same prompt, run once, and its logits are checked
    after a few tokens instead of after the whole context.
    """

    name, packages = "llama.cpp", ("gguf", "llama_cpp")

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        import llama_cpp

        self._api: Any = llama_cpp
        self._problem, case = problem, problem.case
        self._case = case
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(problem, path)
            llama_cpp.llama_backend_init()
            silent = llama_cpp.llama_log_callback(lambda *_: None)
            llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
            self._alive = silent
            options = llama_cpp.llama_model_default_params()
            options.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError("the model could not be loaded")
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = (case.context + case.tokens + 256) // 256 * 256 * case.batch
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = case.batch
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = 30  # GGML_TYPE_BF16
        settings.flash_attn_type = 1
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("no context could be made")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        short = problem.short()[0]
        self._decode([(token, place, 0) for place, token in enumerate(short)])
        self._short_logits = self._logits([len(short) - 1])
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        for start in range(0, case.context, 512):
            part = problem.prompt[start : start + 512]
            self._decode([(token, start + place, 0) for place, token in enumerate(part)])
        for request in range(1, case.batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, request, -1, -1)
        self._step = [
            (token, case.context + place, request)
            for request, tokens in enumerate(problem.tokens)
            for place, token in enumerate(tokens)
        ]
        self._last = [(request + 1) * case.tokens - 1 for request in range(case.batch)]

    def run(self, i: int) -> None:  # noqa: ARG002
        self._decode(self._step)
        self._o = self._logits(self._last)
        for request in range(self._case.batch):
            self._api.llama_memory_seq_rm(self._memory, request, self._case.context, -1)

    def output(self) -> Array:
        return self._o

    def error(self, problem: Problem) -> float:
        assert isinstance(problem, StepProblem)
        return problem.short_error(self._short_logits)

    def _decode(self, step: list[tuple[int, int, int]]) -> None:
        """One batch of (token, position, request); logits after each request's last token."""
        batch = self._batch
        batch.n_tokens = len(step)
        for at, (token, position, request) in enumerate(step):
            batch.token[at], batch.pos[at] = int(token), position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = request
            batch.logits[at] = at + 1 == len(step) or step[at + 1][2] != request
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, places: list[int]) -> Array:
        """`[len(places), vocab]` float32."""
        pointers = [self._api.llama_get_logits_ith(self._context, place) for place in places]
        return np.stack([np.ctypeslib.as_array(pointer, (self._case.vocab,)) for pointer in pointers])
