"""Perplexity of the demo's model in each encoding of GGUF, beside float32, on a text that it was not trained on.

    python -m benchmarks.perplexity wisdom.txt

The text is the Wisdom of Solomon in the King James Version, a verse a line and a blank line before each chapter: the
model was trained on the books of the canon, which this one is not in. Needs the `test` extra, in a checkout: the
tests' plain quantisers make the blocks (tests/support/gguf_blocks.py), and the step is that of `paged-kv generate`.

Blocks of 256 do not fit the model's 192 columns. So it is padded with zeros to 256, and a KV head's three queries with
a fourth that is zero: its numbers stay the same but for rounding, which the table's second row shows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType

from paged_kv.checkpoint.tokenizer_file import TOKENIZER, read_tokenizer
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.model import DecoderModel
from paged_kv.graphs.encodings import GGUF_ENCODINGS

WINDOW = 256
"""Tokens that the model sees at most, as in its training. The first one of a window is not predicted."""
PAGE_SIZE = 16


def perplexity(model: DecoderModel, windows: np.ndarray) -> float:
    """Return the perplexity of `windows` `[n, WINDOW]`, which decode side by side, a token a step."""
    pages = np.arange(len(windows) * WINDOW // PAGE_SIZE).reshape(len(windows), -1).tolist()
    losses = []
    for place in range(WINDOW - 1):
        logits = model.step(windows[:, place, None].tolist(), [place] * len(windows), pages).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        of_next = np.take_along_axis(logits, windows[:, place + 1, None], 1)[:, 0]
        losses.append(np.log(np.exp(logits).sum(-1)) - of_next)
    return float(np.exp(np.mean(losses)))


def padded_model() -> Any:
    """The demo's model as transformers has it, in float32, with rows of 256 elements."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(FOLDER)
    small = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    hidden, dim, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    share = hidden / 256  # of a padded row's elements; a norm's mean is over all of them
    config.update({"hidden_size": 256, "num_attention_heads": 256 // dim, "rms_norm_eps": config.rms_norm_eps * share})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    taken = dict(small.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            values = taken[name]
            if "norm" in name:
                weight[:hidden] = values * share**0.5
            elif "q_proj" in name:
                weight.view(groups, -1, dim, 256)[:, : hidden // dim // groups, :, :hidden] = values.view(
                    groups, -1, dim, hidden
                )
            elif "o_proj" in name:
                weight.view(256, groups, -1, dim)[:hidden, :, : hidden // dim // groups] = values.view(
                    hidden, groups, -1, dim
                )
            else:
                weight[: values.shape[0], : values.shape[1]] = values
    return model


def everywhere(encoding: str) -> Callable[[str], str]:
    """The encoding of a matrix by its name: the same one of all."""
    return lambda _: encoding


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    files = import_module("support.gguf_files")

    def load(path: Path) -> DecoderModel:
        return DecoderModel.from_folder(path, dtype=DType.float32, num_pages=pages, page_size=PAGE_SIZE)

    tokens = read_tokenizer(FOLDER / TOKENIZER).encode(options.text.read_text(), add_special_tokens=False).ids
    windows = np.array(tokens[: len(tokens) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    pages = windows.size // PAGE_SIZE
    model = load(FOLDER)
    exact = perplexity(model, windows)
    mixtures: dict[str, Callable[[str], str]] = {"float32, padded": everywhere("F32")}
    grids = files.gguf_blocks.GRIDS  # for which the tests have no quantiser
    mixtures |= {each: everywhere(each) for each in GGUF_ENCODINGS if not each.startswith(grids)}
    mixtures["Q4_K and Q6_K"] = files.q4_k_m
    print(f"{windows.size} tokens in {len(windows)} windows of {WINDOW}")
    print(f"| float32 | {exact:.3f} | |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, encoding_of in mixtures.items():
            file = files.write_gguf(Path(folder) / f"{name}.gguf", padded_model(), encoding_of)
            found = perplexity(load(file), windows)
            print(f"| {name} | {found:.3f} | {100 * (found / exact - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
