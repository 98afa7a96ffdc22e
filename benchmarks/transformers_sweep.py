"""Every decoder of transformers as a tiny random model: what `paged_kv.transformers` serves, and with which tokens.

    python -m benchmarks.transformers_sweep [MODEL_TYPE ...]

Three prompts, two of them padded and longer than the windows, are continued greedily in float32 by `generate` and by
`generate_batch`, without this package and with it. A model has to be served with the same tokens, or left to
transformers with the warning. Prints a line a model and then the tables of docs/notes/transformers-models.md; the exit
status is 1 where a call with this package raised what transformers alone did not, or gave other tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import paged_kv.transformers
from benchmarks.tiny_decoders import VOCAB, families, small_model
from paged_kv.transformers import served

PROMPTS = [np.random.default_rng(n).integers(2, VOCAB, n).tolist() for n in (7, 45, 60)]
NEW_TOKENS = 4
CALLS = ("generate", "generate_batch")
WRONG = "WRONG"


def generate(model: Any) -> list[list[int]]:
    """Return the new tokens of `generate`, over all prompts at once with padding on the left."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[list[int]] = found[:, longest:].tolist()
    return tokens


def generate_batch(model: Any) -> list[list[int]]:
    """Return the new tokens of `generate_batch`, whose prompts come in parts.

    Raises:
        RuntimeError: a request ended with an error, or was lost.
    """
    results = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=40, page_size=16),
    )
    errors = [result.error for result in results.values() if result.error]
    if errors or len(results) < len(PROMPTS):
        raise RuntimeError(errors[0] if errors else "a request was lost")
    return [result.generated_tokens for result in results.values()]


def attempt(call: Callable[[Any], Any], model: Any) -> tuple[Any, str | None]:
    """Return the tokens of a call or the text of its exception, and why it was left to transformers."""
    found: Any
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call(model)
        except Exception as error:  # whatever a model's own code raises
            found = f"{type(error).__name__}: {error}".splitlines()[0][:150]
    texts = [str(warning.message) for warning in caught]
    reasons = [text.split(": ", 1)[1].rsplit("; ", 1)[0] for text in texts if "does not serve" in text]
    return found, reasons[0] if reasons else None


def outcomes(model: Any) -> list[str]:
    """Return for each of `CALLS` "served", the reason why it was left alone, or what went wrong."""
    found = []
    expected: list[Any] = []
    for call in (generate, generate_batch):
        served._warned.clear()
        with paged_kv.transformers.enabled():
            tokens, reason = attempt(call, model)
        if reason is not None and call is generate_batch:
            found.append(reason)  # it ran transformers' own code, which fails for some models
            continue
        alone, _ = attempt(call, model)
        expected.append(alone)
        if isinstance(tokens, str) and tokens == alone:
            found.append("fails without this package too")
            continue
        # Of generate_batch those of `generate` are right too: transformers' own drops soft caps.
        right = tokens == alone if isinstance(tokens, str) or reason is not None else tokens in expected
        if not right:
            found.append(f"{WRONG}: {tokens}, and alone {alone}")
        else:
            found.append(reason or "served")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    chosen = parser.parse_args().model_types or families()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    tables: list[dict[str, list[str]]] = [defaultdict(list) for _ in CALLS]
    wrong = False
    for model_type in chosen:
        try:
            found = outcomes(small_model(model_type))
        except Exception as error:  # no config of small sizes is known
            found = [f"not tried: {str(error).splitlines()[0]}"] * len(CALLS)
        print(model_type, *found, sep=" | ", flush=True)
        wrong |= any(outcome.startswith(WRONG) for outcome in found)
        tables[0][found[0]].append(model_type)
        if found[1] != found[0]:
            tables[1][found[1]].append(model_type)
    for call, table in zip(CALLS, tables, strict=True):
        print(f"\n| `{call}`{'' if table is tables[0] else ', where it differs'} | models |\n|---|---|")
        for outcome, types in sorted(table.items(), key=lambda item: -len(item[1])):
            print(f"| {outcome} | {len(types)}: {', '.join(types)} |")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
