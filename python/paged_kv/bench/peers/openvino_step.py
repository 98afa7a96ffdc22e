"""OpenVINO on the same model: what OpenVINO GenAI makes of its GGUF file in float16, weights compressed by nncf."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.bench.model_files import write_gguf
from paged_kv.bench.peer import Peer
from paged_kv.bench.problems import Array, Problem
from paged_kv.bench.steps import StepProblem

KV_PRECISION = "u8"
"""That of K and V."""


class OpenVinoStep(Peer):
    """The graph of OpenVINO GenAI's reader, whose attention keeps K and V in the request of the plugin.

    Weights of a file of Q8_0 are int8, a scale a row; of Q4_K_M int4, a scale for each 128: what its users compress to.
    The blocks of a GGUF file it reads too, and is slower. Its cache cannot be cropped: each run sees one more
    token than the last, and the logits that are checked are those after a few tokens.
    """

    name, packages = "OpenVINO", ("nncf", "openvino", "openvino_genai")

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        import openvino

        self._case = case = problem.case
        core = openvino.Core()
        with tempfile.TemporaryDirectory() as folder:
            model = self._compressed(core.read_model(_converted(problem, Path(folder))))
            settings = {"PERFORMANCE_HINT": "LATENCY", "KV_CACHE_PRECISION": KV_PRECISION, **_limits()}
            self._request: Any = core.compile_model(model, "CPU", settings).create_infer_request()
        self._past = 0
        self._step(problem.short())
        self._short_logits = self._o
        self._request.reset_state()
        self._past = 0
        for start in range(0, case.context, 512):
            self._step(np.tile(problem.prompt[start : start + 512], (case.batch, 1)))
        self._tokens = problem.tokens

    def _compressed(self, model: Any) -> Any:
        import nncf

        if self._case.file_type is None:
            return model
        modes = nncf.CompressWeightsMode
        if self._case.file_type == "Q8_0":
            return nncf.compress_weights(model, mode=modes.INT8_SYM)
        return nncf.compress_weights(model, mode=modes.INT4_SYM, group_size=128, all_layers=True)

    def _step(self, tokens: Array) -> None:
        batch, new = tokens.shape
        end = self._past + new
        self._request.infer(
            {
                "input_ids": tokens.astype(np.int64),
                "attention_mask": np.ones((batch, end), np.int64),
                "position_ids": np.tile(np.arange(self._past, end), (batch, 1)),
                "beam_idx": np.arange(batch, dtype=np.int32),
            }
        )
        self._past = end
        self._o = self._request.get_tensor("logits").data[:, -1].astype(np.float32)

    def run(self, i: int) -> None:  # noqa: ARG002
        if not self._case.context:
            self._request.reset_state()
            self._past = 0
        self._step(self._tokens)

    def output(self) -> Array:
        return self._o

    def error(self, problem: Problem) -> float:
        assert isinstance(problem, StepProblem)
        return problem.short_error(self._short_logits)


def _limits() -> dict[str, str]:
    """Settings that OpenVINO has by itself on a CPU of AVX2 alone, for oneDNN limited to that: no bfloat16, no int8
    products. Its attention and conversions still use what the CPU has.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2":
        return {}
    return {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def _converted(problem: StepProblem, folder: Path) -> Path:
    """The model in OpenVINO's own format, in float16."""
    import openvino_genai

    path = folder / "model.gguf"
    write_gguf(problem, path, plain="F16")
    with contextlib.suppress(IndexError):  # the file has no tokenizer, which is read last
        openvino_genai.LLMPipeline(path, "CPU", enable_save_ov_model=True)
    return folder / "openvino_model.xml"
