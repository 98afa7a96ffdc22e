"""Trains the small Llama that `paged-kv demo` runs: some 20 minutes on one core, from a text in the public domain.

The text is the King James Bible as Debian ships it: `apt-get install bible-kjv`. Needs torch and transformers
(`pip install 'paged-kv[test]'`). The seed fixes the order of the text and the first weights; sums on other CPUs differ
in their last bits, so a model that is trained again speaks alike, not the same.

    python examples/train_demo_model.py --out DIR
"""

import argparse
import json
import math
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VERSES = "gen1:1-rev22:21"
BEGIN, END = "<s>", "</s>"
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
"""The model knows no chat: it continues what was said."""


def bible(command: str) -> str:
    """All verses, one a line, a blank line before each chapter."""
    lines = subprocess.run([command, "-f", VERSES], check=True, capture_output=True, text=True).stdout.splitlines()
    text = []
    for line in lines:
        place, verse = line.split(" ", 1)
        text += ["", verse] if place.endswith(":1") and text else [verse]
    return "\n".join(text) + "\n"


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BEGIN, END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def train(model: LlamaForCausalLM, tokens: torch.Tensor, *, steps: int, batch: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    decayed = [weights for weights in model.parameters() if weights.ndim > 1]
    others = [weights for weights in model.parameters() if weights.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(steps):
        warm, left = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * warm * (0.05 + 0.95 * left)
        starts = rng.integers(0, len(tokens) - length, batch)
        rows = torch.stack([tokens[start : start + length] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bible", default="bible", help="the program of the Debian package bible-kjv")
    parser.add_argument("--text", type=Path, help="another text than the Bible")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = bible(options.bible) if options.text is None else options.text.read_text()
    tokenizer = train_tokenizer(text, vocab_size=2048)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
    )
    model = LlamaForCausalLM(config)
    count = sum(weights.numel() for weights in model.parameters())
    print(f"{len(text)} characters, {len(tokens)} tokens, {count} parameters")
    train(model, tokens, steps=options.steps, batch=12, length=256, seed=options.seed)

    options.out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied
    save_file(weights, options.out / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float32  # of the step that comes compiled with a wheel; the file is half as large
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(options.out)
    tokenizer.save(str(options.out / "tokenizer.json"))
    settings = {
        "bos_token": BEGIN,
        "eos_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
