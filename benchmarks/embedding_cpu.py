"""Texts a second of a model that embeds, against transformers, sentence-transformers and llama.cpp.

    python -m benchmarks.embedding_cpu [--texts 512] [--layers 8] [--kind bfloat16|float32|Q8_0]

A random Llama of the sizes of Qwen3-Embedding-0.6B with fewer layers and a vocabulary of bytes; texts of 128 tokens;
vectors of the last token, normed. sentence-transformers and we are given texts, the others their tokens. transformers
and sentence-transformers have batches of 32 texts without padding, llama.cpp has its own of 2,048 tokens. They run in
turns; figures are texts a second, the best and the median of the turns, and the largest difference from our vectors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paged_kv.bench.job import take_turns
from paged_kv.bench.model_files import write_folder, write_gguf
from paged_kv.bench.steps import StepProblem
from paged_kv.bench.weight_cases import StepCase
from paged_kv.engine import load_embedder
from paged_kv.engine.demo import PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE, byte_tokenizer

TOKENS, BATCH, STEP = 128, 32, 2048
CASE = StepCase("embedding", "", hidden=1024, intermediate=3072, heads=16, head_dim=128, vocab=VOCAB_SIZE, context=0)
Vectors = npt.NDArray[np.float32]
Run = Callable[[], Vectors]


def write_model(folder: Path, layers: int, kind: str) -> Path:
    """A checkpoint in float32 as sentence-transformers has it, and beside it the GGUF file of the same numbers."""
    import transformers

    problem = StepProblem(replace(CASE, layers=layers, file_type="Q8_0" if kind == "Q8_0" else None), 0)
    write_gguf(problem, folder / "model.gguf", plain="F32" if kind == "float32" else "BF16")
    problem.weights = {name: problem.values(name.removesuffix(".weight")) for name in problem.weights}
    write_folder(problem, folder, "float32", {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD_ID})
    special = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **special).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    listed = [each | {"idx": index, "name": str(index)} for index, each in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": CASE.hidden, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder / "model.gguf"


def ours(path: Path, texts: list[str], dtype: str) -> Run:
    embedder = load_embedder(path, task="embed", dtype=dtype, max_length=TOKENS, max_step_tokens=STEP)
    return lambda: embedder.embed(texts)


def by_transformers(folder: Path, tokens: list[list[int]], dtype: str) -> Run:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run() -> Vectors:
        batches = [torch.tensor(tokens[first : first + BATCH]) for first in range(0, len(tokens), BATCH)]
        rows = torch.cat([model(batch, use_cache=False).last_hidden_state[:, -1] for batch in batches])
        return np.asarray(torch.nn.functional.normalize(rows.float(), dim=1).numpy())

    return run


def by_sentence_transformers(folder: Path, texts: list[str], dtype: str) -> Run:
    sentence_transformers = import_module("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    return lambda: np.asarray(model.encode(texts, batch_size=BATCH, convert_to_tensor=True).float().numpy())


def by_llama_cpp(file: Path, tokens: list[list[int]]) -> Run:
    import llama_cpp as api

    api.llama_backend_init()
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = STEP
    settings.n_seq_max = STEP // TOKENS
    settings.kv_unified = True
    settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
    settings.embeddings, settings.pooling_type = True, api.LLAMA_POOLING_TYPE_LAST
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(STEP, 0, 1)
    size, each = CASE.hidden, STEP // TOKENS

    def run() -> Vectors:
        rows = np.empty((len(tokens), size), np.float32)
        for first in range(0, len(tokens), each):
            texts = tokens[first : first + each]
            api.llama_memory_clear(api.llama_get_memory(context), True)
            batch.n_tokens = sum(map(len, texts))
            for at, (text, place) in enumerate((text, place) for text in range(len(texts)) for place in range(TOKENS)):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = texts[text][place], place, 1
                batch.seq_id[at][0], batch.logits[at] = text, True
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for text in range(len(texts)):
                rows[first + text] = np.ctypeslib.as_array(api.llama_get_embeddings_seq(context, text), (size,))
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    run.keeps = silent  # type: ignore[attr-defined]
    return run


def _turn(run: Run) -> Callable[[int], object]:
    return lambda _: run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kind", choices=["bfloat16", "float32", "Q8_0"], default="bfloat16")
    asked = parser.parse_args()
    letters = np.random.default_rng(0).integers(97, 123, (asked.texts, TOKENS - 1))
    texts = ["".join(map(chr, row)) for row in letters]
    tokens = [byte_tokenizer().encode(text).ids for text in texts]
    dtype = "float32" if asked.kind == "float32" else "bfloat16"
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = write_model(folder, asked.layers, asked.kind)
        systems: dict[str, Callable[[], Run]] = {
            "ours": lambda: ours(file if asked.kind == "Q8_0" else folder, texts, dtype),
            "transformers": lambda: by_transformers(folder, tokens, dtype),
            "sentence-transformers": lambda: by_sentence_transformers(folder, texts, dtype),
            "llama.cpp": lambda: by_llama_cpp(file, tokens),
        }
        for name, make in systems.items():
            try:
                runs[name] = make()
            except ImportError as error:
                print(f"{name}: left out: {error}")
        vectors = {name: run() for name, run in runs.items()}
        times = take_turns({name: _turn(run) for name, run in runs.items()}, asked.turns)
    print(f"{asked.texts} texts of {TOKENS} tokens, {asked.layers} layers, {asked.kind}")
    for name, seconds in times.items():
        rates = [asked.texts / each for each in seconds]
        difference = np.abs(vectors[name] - vectors["ours"]).max()
        print(f"{name:22} {max(rates):8.2f} ({statistics.median(rates):.2f})   {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
