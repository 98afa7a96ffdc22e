"""Texts a second of a model that embeds, against transformers, sentence-transformers and llama.cpp.

    python -m benchmarks.embedding_cpu [--texts 512] [--layers 8] [--kind bfloat16|float32|Q8_0]

A random model of the shape of Qwen3-Embedding-0.6B with fewer layers and a vocabulary of bytes; texts of 128 tokens;
vectors of the last token, normed. sentence-transformers and we are given texts, the others their tokens. transformers
and sentence-transformers have batches of 32 texts without padding, llama.cpp has its own of 2,048 tokens. What is not
installed is left out. They run in turns; figures are texts a second, the best and the median of the turns, and the
largest difference from our vectors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.bench.job import take_turns
from paged_kv.engine import load_embedder
from paged_kv.engine.demo import VOCAB_SIZE, byte_tokenizer
from paged_kv.graphs.models.qwen3 import FAMILY

TOKENS, BATCH, STEP = 128, 32, 2048
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 258,
}  # fmt: skip
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
Vectors = npt.NDArray[np.float32]
Run = Callable[[], Vectors]


def write_model(folder: Path, layers: int) -> Any:
    """A checkpoint in float32 as sentence-transformers has it; its model."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, num_hidden_layers=layers)).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in MODULES]
    (folder / "modules.json").write_text(
        json.dumps([each | {"idx": at, "name": str(at)} for at, each in enumerate(listed)])
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return model


def write_gguf(file: Path, model: Any, kind: str) -> None:
    """The same model as llama.cpp reads it, without a vocabulary."""
    import gguf

    writer, config = gguf.GGUFWriter(file, "qwen3"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pooling_type(gguf.PoolingType.LAST)
    writer.add_tokenizer_model("no_vocab")
    assert FAMILY.gguf is not None
    encoding = {"bfloat16": "BF16", "float32": "F32"}.get(kind, kind)
    for name, values in model.state_dict().items():
        array, raw = values.float().numpy(), gguf.GGMLQuantizationType[encoding if values.ndim == 2 else "F32"]
        if values.ndim == 2:
            array = gguf.quants.quantize(array, raw)
        writer.add_tensor(FAMILY.gguf.tensor(f"model.{name}"), array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(path: Path, texts: list[str], dtype: str) -> Run:
    embedder = load_embedder(path, dtype=dtype, max_step_tokens=STEP)
    return lambda: embedder.embed(texts)


def by_transformers(model: Any, tokens: list[list[int]], dtype: str) -> Run:
    import torch

    model = model.to(getattr(torch, dtype))

    def run() -> Vectors:
        rows = []
        with torch.inference_mode():
            for first in range(0, len(tokens), BATCH):
                states = model(torch.tensor(tokens[first : first + BATCH]), use_cache=False).last_hidden_state
                rows.append(torch.nn.functional.normalize(states[:, -1].float(), dim=1))
        return np.asarray(torch.cat(rows).numpy())

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
    size, each = SIZES["hidden_size"], STEP // TOKENS

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
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "model", Path(place) / "file/model.gguf"
        model = write_model(folder, asked.layers)
        runs: dict[str, Run] = {}
        if find_spec("gguf") is not None:
            file.parent.mkdir()
            write_gguf(file, model, asked.kind)
            byte_tokenizer().save(str(file.parent / "tokenizer.json"))
        runs["ours"] = ours(file if asked.kind == "Q8_0" else folder, texts, dtype)
        runs["transformers"] = by_transformers(model, tokens, dtype)
        if find_spec("sentence_transformers") is not None:
            runs["sentence-transformers"] = by_sentence_transformers(folder, texts, dtype)
        if find_spec("llama_cpp") is not None:
            runs["llama.cpp"] = by_llama_cpp(file, tokens)
        vectors = {name: run() for name, run in runs.items()}
        times = take_turns({name: _turn(run) for name, run in runs.items()}, asked.turns)
    print(f"{asked.texts} texts of {TOKENS} tokens, {asked.layers} layers, {asked.kind}")
    for name, seconds in times.items():
        rates = [asked.texts / each for each in seconds]
        error = np.abs(vectors[name] - vectors["ours"]).max()
        print(f"{name:22} {max(rates):8.2f} ({statistics.median(rates):.2f})   {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
