"""Hugging Face transformers with `paged_kv.transformers` and without: seconds, time of a decode step, peak memory.

    python -m benchmarks.transformers_cpu [--calls generate generate_batch] [--batches 1 8] [--contexts 512 4096]
        [--new-tokens 1] [--rounds 2] [--limit SECONDS]

A Llama of 1.1 G random parameters in bfloat16 (22 layers, 32 query and 4 KV heads of 64) computes B prompts of as many
tokens, and `--new-tokens` tokens of each. Every run is a process of its own, so that its peak of resident memory
(`ru_maxrss`) is its own; the two systems take turns. A prompt of 16 tokens comes first: what compiles has compiled.
With `--new-tokens` of 3 and more a decode step is timed too: of forward passes of B tokens the median time since the
end of the pass before, sampling and scheduling included.
A run that takes longer than the limit is ended, and its cell says so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
PAGE_SIZE = 256
"""Transformers' own default."""
SYSTEMS = ("transformers", "paged-kv")


def random_model() -> Any:
    """The model; its weights are small enough for finite logits."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SIZES, eos_token_id=None, pad_token_id=0, dtype=torch.bfloat16)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.03, 0.03)
    rotary: Any = LlamaRotaryEmbedding  # transformers has no types
    model.model.rotary_emb = rotary(config)  # its frequencies are no weights
    return model


def run(system: str, call: str, batch: int, context: int, new_tokens: int) -> dict[str, float]:
    """One cell in this process: seconds, and GB of memory at most and before."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    if system == "paged-kv":
        import paged_kv.transformers

        paged_kv.transformers.enable()
    model = random_model()
    pages = ContinuousBatchingConfig(
        num_blocks=batch * (-(-(context + new_tokens) // PAGE_SIZE) + 1), page_size=PAGE_SIZE, max_batch_tokens=2048
    )

    def compute(prompts: torch.Tensor, tokens: int) -> None:
        never = None if call == "generate" else -1  # ends a text
        greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=never, pad_token_id=0)
        if call == "generate":
            found = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy)
            assert found.shape[1] == prompts.shape[1] + tokens
            return
        results = model.generate_batch(
            prompts.tolist(), generation_config=greedy, continuous_batching_config=pages, progress_bar=False
        )
        assert len(results) == len(prompts), f"{len(results)} of {len(prompts)} prompts have a result"
        assert all(len(result.generated_tokens) == tokens for result in results.values())

    compute(torch.randint(1, 32000, (1, 16)), 2)
    ends: list[tuple[int, float]] = []

    def note(module: Any, arguments: Any, keywords: Any, outputs: Any) -> None:
        del module, outputs
        tokens = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        ends.append((tokens.numel(), time.perf_counter()))

    model.register_forward_hook(note, with_kwargs=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prompts = torch.randint(1, 32000, (batch, context))
    start = time.perf_counter()
    compute(prompts, new_tokens)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    last = ends[1 - new_tokens :] if new_tokens > 2 else []  # the first token is the prompt's
    steps = [end - start for (_, start), (tokens, end) in pairwise(last) if tokens == batch]
    step = {"step_ms": 1e3 * median(steps)} if steps else {}
    return {"seconds": seconds, "peak_gb": peak / 1e6, "before_gb": before / 1e6} | step


def run_apart(cell: tuple[Any, ...], limit: float) -> dict[str, float] | None:
    """`run` in a process of its own; None where it takes longer than `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.transformers_cpu", "--cell", json.dumps(cell)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, float] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def shown(runs: list[dict[str, float] | None]) -> tuple[list[str], float | None, float | None]:
    """Return the median time of a system's runs, that of a decode step and the peak of memory; both times as
    numbers.
    """
    done = [found for found in runs if found is not None]
    if len(done) < len(runs):
        return ["over the limit", "", ""], None, None
    seconds = median(found["seconds"] for found in done)
    peak = f"{max(found['peak_gb'] for found in done):.2f}"
    if "step_ms" not in done[0]:
        return [f"{seconds:.2f}", "", peak], seconds, None
    step = median(found["step_ms"] for found in done)
    return [f"{seconds:.2f}", f"{step:.0f}", peak], seconds, step


def gain(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}x" if theirs and ours else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--calls", nargs="+", choices=("generate", "generate_batch"), default=["generate", "generate_batch"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--new-tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a run")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell is not None:
        print(json.dumps(run(*json.loads(arguments.cell))))
        sys.stdout.flush()
        os._exit(0)  # threads of continuous batching may still wait
    print(
        f"{'call':<16}{'B':>3}{'tokens':>8}  "
        + "".join(f"{system + ', s':>18}{'step, ms':>10}{'GB':>8}" for system in SYSTEMS)
        + "   gain   of a step"
    )
    for call in arguments.calls:
        for context in arguments.contexts:
            for batch in arguments.batches:
                runs: dict[str, list[dict[str, float] | None]] = {system: [] for system in SYSTEMS}
                for _ in range(arguments.rounds):
                    for system in SYSTEMS:
                        cell = (system, call, batch, context, arguments.new_tokens)
                        runs[system].append(run_apart(cell, arguments.limit))
                columns = [shown(runs[system]) for system in SYSTEMS]
                cells = "".join(f"{seconds:>18}{step:>10}{peak:>8}" for (seconds, step, peak), _, _ in columns)
                gains = f"{gain(columns[0][1], columns[1][1])}   {gain(columns[0][2], columns[1][2])}"
                print(f"{call:<16}{batch:>3}{context:>8}  {cells}   {gains}", flush=True)


if __name__ == "__main__":
    main()
