"""The small engine's steps as `paged-kv generate` runs them, without a server: what serving is held against.

A child process, `python -m benchmarks.servers.engine_steps FOLDER BATCH LENGTH`: each line on stdin is a JSON
object (prompts, new_tokens) and is answered by one on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from benchmarks.serve_checkpoint import Checkpoint
from benchmarks.serve_client import Stream
from benchmarks.servers.base import NotMeasured, System, last_line

PAGE_SIZE = 128
"""As MAX's pages, so that the attention of both is the same work."""


class EngineSteps(System):
    label = "paged-kv generate"

    def unavailable(self, checkpoint: Checkpoint) -> str | None:  # noqa: ARG002
        return None

    def version(self) -> str:
        return metadata.version("paged-kv")

    def command(self, checkpoint: Checkpoint, port: int, batch: int, length: int) -> list[str]:  # noqa: ARG002
        return [sys.executable, "-m", __name__, str(checkpoint.folder), str(batch), str(length)]

    def streams(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([[list(prompt) for prompt in prompts], new_tokens]).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        return [Stream(answer["sent"], times, new_tokens) for times in answer["arrivals"]]

    def _open(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )

    def _ready(self) -> bool:
        return bool(self._answer()["ready"])

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotMeasured(last_line(self._log))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Loop:
    """A model, and the pages of up to `batch` requests."""

    def __init__(self, folder: Path, batch: int, length: int) -> None:
        from max.dtype import DType

        from paged_kv.engine.model import DecoderModel

        self._each = -(-length // PAGE_SIZE)
        self._model = DecoderModel.from_folder(
            folder, dtype=DType.bfloat16, num_pages=batch * self._each, page_size=PAGE_SIZE
        )
        self._prompts: Sequence[Sequence[int]] = []

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Prompts that are in the cache already, those of the last run, are not read again but for their last token."""
        from paged_kv.engine.engine import MAX_STEP_TOKENS
        from paged_kv.engine.sampling import Choice, History, Sampling, choose

        pages = [list(range(at * self._each, (at + 1) * self._each)) for at in range(len(prompts))]
        requests = list(range(len(prompts)))
        histories = [
            History(Sampling(), 0, request, list(prompt), len(prompt)) for request, prompt in enumerate(prompts)
        ]
        sent = time.perf_counter()
        if prompts != self._prompts:
            for prompt, own in zip(prompts, pages, strict=True):
                for begin in range(0, len(prompt) - 1, MAX_STEP_TOKENS):
                    self._model.step([prompt[begin : min(begin + MAX_STEP_TOKENS, len(prompt) - 1)]], [begin], [own])
            self._prompts = prompts
        tokens, lengths = [prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
        arrivals = []
        for _ in range(new_tokens):
            logits = self._model.step([[token] for token in tokens], lengths, pages)
            choices = choose(logits, requests, histories)
            tokens = [choice.token for choice in choices if isinstance(choice, Choice)]
            lengths = [length + 1 for length in lengths]
            arrivals.append(time.perf_counter())
        return {"sent": sent, "arrivals": [arrivals] * len(prompts)}


def main(folder: Path, batch: int, length: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    loop = Loop(folder, batch, length)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        answers.write(json.dumps(loop.run(prompts, new_tokens)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
