"""The same seeded model in every format that a server reads, written once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paged_kv.bench.model_files import write_folder, write_gguf
from paged_kv.bench.steps import StepProblem
from paged_kv.bench.weight_cases import StepCase
from paged_kv.engine.demo import BOS_ID, CHAT_TEMPLATE, EOS_ID, PAD_ID, SPECIAL_TOKENS, byte_tokenizer
from paged_kv.errors import ToolchainError

LLAMA_SERVER = "PAGED_KV_LLAMA_SERVER"
"""The environment variable that names llama.cpp's server; `llama-quantize` lies beside it."""


@dataclass(frozen=True)
class Checkpoint:
    """The files of one model. Those of llama.cpp are there if its tools were."""

    model: str
    """A key of `serve_cases.MODELS`."""
    root: Path

    @property
    def folder(self) -> Path:
        """bfloat16, as Hugging Face writes it."""
        return self.root / "bfloat16"

    @property
    def float32(self) -> Path:
        """The same numbers."""
        return self.root / "float32"

    @property
    def bfloat16_gguf(self) -> Path:
        return self.root / "bfloat16.gguf"

    @property
    def q4_k(self) -> Path:
        """llama.cpp's Q4_K_M: some tensors are Q6_K."""
        return self.root / "q4_k_m.gguf"

    def missing(self, weights: str) -> str | None:
        """The reason why there are no such weights; None where there are."""
        if weights == "q4_k" and not self.q4_k.exists():
            return f"no Q4_K_M file: it is written by gguf and llama-quantize ({LLAMA_SERVER})"
        return None


def write_checkpoint(case: StepCase, root: Path, seed: int = 0) -> Checkpoint:
    """Writes what is not there yet: a file is complete once it has its name.

    Raises:
        ToolchainError: llama.cpp's tool failed.
    """
    checkpoint = Checkpoint(case.name, root)
    root.mkdir(parents=True, exist_ok=True)
    wanted = [checkpoint.folder, checkpoint.float32]
    if find_spec("gguf") is not None:
        wanted.append(checkpoint.bfloat16_gguf)
    if not all(path.exists() for path in wanted):
        problem = StepProblem(case, seed)
        for folder, dtype in ((checkpoint.folder, "bfloat16"), (checkpoint.float32, "float32")):
            if not folder.exists():
                _write_folder(problem, folder, dtype)
        if checkpoint.bfloat16_gguf in wanted and not checkpoint.bfloat16_gguf.exists():
            part = _part(checkpoint.bfloat16_gguf)
            write_gguf(problem, part, vocabulary(case.vocab))
            part.rename(checkpoint.bfloat16_gguf)
    for file in checkpoint.folder.glob("tokenizer*.json"):  # a GGUF file's tokenizer lies beside it
        shutil.copyfile(file, root / file.name)
    tool = _quantize_tool()
    if tool is not None and checkpoint.bfloat16_gguf.exists() and not checkpoint.q4_k.exists():
        part = _part(checkpoint.q4_k)
        command = [tool, str(checkpoint.bfloat16_gguf), str(part), "Q4_K_M"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ToolchainError(f"{tool}: {done.stderr.strip().splitlines()[-1]}")
        part.rename(checkpoint.q4_k)
    return checkpoint


def vocabulary(size: int) -> list[str]:
    """Tokens in order: the bytes, the special ones, words that no text is encoded to. The last is the two before it."""
    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    words = [f"\u0120w{token}" for token in range(len(tokens), size - 1)]
    return [*tokens, *words, "".join(words[-2:])]


def _write_folder(problem: StepProblem, folder: Path, dtype: str) -> None:
    part = _part(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_folder(problem, part, dtype, ids)
    (part / "generation_config.json").write_text(json.dumps(ids))
    tokenizer = json.loads(byte_tokenizer().to_str())
    # The special ones too: a loader gives tokens that the model's vocabulary lacks an id of its own.
    tokenizer["model"]["vocab"] = {token: at for at, token in enumerate(vocabulary(problem.case.vocab))}
    (part / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
    (part / "tokenizer_config.json").write_text(json.dumps(settings))
    part.rename(folder)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _quantize_tool() -> str | None:
    server = shutil.which(os.environ.get(LLAMA_SERVER) or "llama-server")
    return shutil.which(str(Path(server).with_name("llama-quantize"))) if server else None
