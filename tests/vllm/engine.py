"""Greedy tokens of vLLM's engine on the CPU for small random models: `python engine.py FOLDER`.

FOLDER/cases.json lists the cases; a line of JSON is printed for each. Whether the plugin of this package is used is for
`VLLM_PLUGINS` to say. The engine runs in this process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def write_model(family: str, options: dict[str, Any], folder: Path) -> None:
    """A checkpoint of random weights, the same each time."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # sharp enough for one best token
                weight.mul_(4.0)
    model.save_pretrained(folder)


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The tokens of each prompt, and what the first token's best logits are."""
    write_model(case["family"], case["options"], folder)
    engine = vllm.LLM(
        str(folder),
        dtype=case["dtype"],
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
        enable_chunked_prefill=True,
        enforce_eager=case["eager"],
        max_logprobs=128,
        logprobs_mode="raw_logits",
    )
    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False, logprobs=128
    )
    given = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    outputs = [done.outputs[0] for done in engine.generate(given, greedy, use_tqdm=False)]
    logits = [[output.logprobs[0][token].logprob for token in range(128)] for output in outputs]
    return {"tokens": [list(output.token_ids) for output in outputs], "logits": logits}


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's own lines
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        found = run(case, folder / str(number))
        answers.write(json.dumps(found | {"backend": AttentionBackendEnum.CPU_ATTN.get_path()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
