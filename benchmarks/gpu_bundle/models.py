"""The models whose steps the bundle has, the demo's and a Llama of 1.1 G parameters, and their checks (`checks.py`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from max.dtype import DType

from benchmarks.gpu_bundle.run import emit
from paged_kv.bench.steps import StepProblem, decoder_config
from paged_kv.bench.weight_cases import StepCase
from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.step import DEMO_DTYPE, StepGraph

LLAMA = StepCase("llama", "a Llama of 1.1 G parameters", context=0, tokens=16)
"""Its logits are checked after 16 tokens."""


def demo_step() -> StepGraph:
    """That of `paged-kv demo --device gpu`."""
    return StepGraph.of(load_config(FOLDER), DEMO_DTYPE)


def llama_step() -> StepGraph:
    """That of `LLAMA`, in bfloat16."""
    return StepGraph.of(decoder_config(LLAMA), DType[LLAMA.dtype])


def demo(device: str) -> str:
    from paged_kv.cli import main as command

    sys.argv = ["paged-kv", "demo", "--device", device]
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"the demo ended with {end.code}") from end
    return "the demo's tokens are right"


def pages(device: str) -> str:
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.engine.disk_tier import DiskTier
    from paged_kv.engine.engine import Engine
    from paged_kv.engine.model import DecoderModel
    from paged_kv.engine.sampling import Sampling
    from paged_kv.engine.step import DEMO_DTYPE
    from paged_kv.runtime.session import runtime_on

    def model() -> DecoderModel:
        runtime = runtime_on(0 if device == "gpu" else None)
        return DecoderModel.from_folder(FOLDER, dtype=DEMO_DTYPE, num_pages=64, runtime=runtime)

    def tokens_of(engine: Engine, prompt: Sequence[int], n: int = 1) -> list[list[int]]:
        engine.add_request(prompt, Sampling(24), n)
        found: dict[int, list[int]] = {}
        while not engine.is_idle:
            for output in engine.step():
                found.setdefault(output.sample, []).extend(output.tokens)
        return [found[sample] for sample in range(n)]

    prompt = np.random.default_rng(0).integers(1, 250, 70).tolist()
    (expected,) = tokens_of(Engine(model(), share_prefixes=False), prompt)
    with TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder, "tier"), 1 << 26)
        first = Engine(model(), disk=tier)
        texts = {"forks": tokens_of(first, prompt, 3), "again": tokens_of(first, prompt)}
        first.flush()
        restarted = Engine(model(), disk=DiskTier(Path(folder, "tier"), 1 << 26))
        texts["from disk"] = tokens_of(restarted, prompt)
        texts["lookup"] = tokens_of(Engine(model(), speculate="lookup"), prompt)
        emit(check="pages", restored=restarted.tokens_restored)
        if not restarted.tokens_restored:
            raise AssertionError("pages on disk were not found")
    for name, found in texts.items():
        if any(text != expected for text in found):
            raise AssertionError(f"{name}: {found}, alone {expected}")
    return "forks, the disk tier and lookup change no token"


def llama(device: str) -> str:
    from paged_kv.engine.model import DecoderModel
    from paged_kv.runtime.session import runtime_on

    case, page_size = LLAMA, 16
    sizes = [(batch, length) for batch in (1, 8, 64) for length in (512, 4096)] if device == "gpu" else [(1, 512)]
    pages = max(batch * (length // page_size + 1) for batch, length in sizes) + 128
    began = time.perf_counter()
    problem = StepProblem(case, 0)
    emit(check="llama", weights_seconds=time.perf_counter() - began)
    began = time.perf_counter()
    runtime = runtime_on(0 if device == "gpu" else None)
    dtype = DType[case.dtype]
    model = DecoderModel(
        decoder_config(LLAMA), problem.weights, dtype=dtype, num_pages=pages, page_size=page_size, runtime=runtime
    )
    emit(check="llama", load_seconds=time.perf_counter() - began)
    tokens = problem.short()[0].tolist()
    found = model.step([tokens], [0], [[pages - 1]])
    off = problem.short_error(found)
    emit(check="llama", prompt=len(tokens), off=off)
    if not off <= problem.tolerance:
        raise AssertionError(f"the logits of a prompt of {len(tokens)} tokens are off by {off:.1e}")
    if device == "gpu":
        import torch

        torch.utils.dlpack.from_dlpack(model.blocks).normal_()
        torch.cuda.synchronize()
    rng = np.random.default_rng(0)
    for batch, length in sizes:
        owned = -(-(length + 1) // page_size)
        table = rng.permutation(pages)[: batch * owned].reshape(batch, owned).tolist()
        rows = rng.integers(0, case.vocab, (batch, 1)).tolist()
        times = []
        for _ in range(12):
            began = time.perf_counter()
            model.step(rows, [length] * batch, table)
            times.append(time.perf_counter() - began)
        emit(check="llama step", batch=batch, length=length, ms=1e3 * float(np.median(times[2:])))
    prompt = rng.integers(0, case.vocab, 2048).tolist()
    table = [list(range(128))]
    for _ in range(2):
        began = time.perf_counter()
        model.step([prompt], [0], table)
        elapsed = time.perf_counter() - began
    emit(check="llama prompt", tokens=len(prompt), ms=1e3 * elapsed)
    return "a Llama's logits are right"
