"""vLLM's engine as a child process of `vllm_step.py`: it may run in another environment, without paged_kv.

    python vllm_engine.py FOLDER SETTINGS

SETTINGS is JSON; each line on stdin requests one step, and is answered by one line on stdout. The first line on stdout
comes once the requests have their context; FOLDER/logits.json then has the logits after the tokens `short`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST = 1024
"""Tokens that a decoding request may generate: more than a benchmark generates."""


def main(folder: Path, settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's log lines
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # vLLM asks the CPU which build of its kernels to load
        for name in ("_is_avx512_supported", "_is_avx512_bf16_supported"):
            setattr(import_module("torch").cpu, name, lambda: False)
    vllm: Any = import_module("vllm")
    batch, context = len(settings["tokens"]), len(settings["prompt"])
    new = len(settings["tokens"][0])
    engine = vllm.LLMEngine.from_engine_args(
        vllm.EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=context + new + LONGEST,
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, context, new),
            enable_prefix_caching=False,  # every prefill is one
            disable_log_stats=True,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
        )
    )
    count = 0

    def add(tokens: list[int], **options: Any) -> None:
        nonlocal count
        count += 1
        params = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **options)
        engine.add_request(str(count), {"prompt_token_ids": tokens}, params)

    add(settings["short"], max_tokens=1, logprobs=-1)
    (answer,) = finish(engine)
    logits = {int(token): one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
    (folder / "logits.json").write_text(json.dumps([logits[token] for token in range(settings["vocab"])]))

    if context:  # decode: all requests have the context, and a step adds a token to each
        for _ in range(batch):
            add(settings["prompt"], max_tokens=LONGEST)
        generated = 0
        while generated < batch:  # the prompts are split over steps
            generated = sum(len(one.outputs[0].token_ids) > 0 for one in engine.step())
    for ready in range(10**9):
        answers.write(f"{ready}\n")
        if not sys.stdin.readline():
            return
        if context:
            step = engine.step()
            if len(step) != batch:
                raise RuntimeError(f"a step of {len(step)} requests, not {batch}")
        else:
            for tokens in settings["tokens"]:
                add(tokens, max_tokens=1)
            if len(finish(engine)) != batch:
                raise RuntimeError("a prefill did not end")


def finish(engine: Any) -> list[Any]:
    """Step until nothing is left, and return what ended."""
    done = []
    while engine.has_unfinished_requests():
        done += [one for one in engine.step() if one.finished]
    return done


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
