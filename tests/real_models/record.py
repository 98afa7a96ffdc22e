"""Records what llama.cpp answers: `python tests/real_models/record.py FILE...`, where llama-cpp-python is installed.

The test asserts that this package gives the same tokens, and nearly the same log-likelihood and greedy text.
"""

import datetime
import json
import sys
from importlib.metadata import version
from pathlib import Path

import llama_cpp
import numpy as np

FOLDER = Path(__file__).parent
TOKENS = 1000
BEGINNING = "One, two, three, four,"
NEW_TOKENS = 24


def answers(file: str) -> dict[str, object]:
    """The answers of the model in a file: of the text and of a beginning."""
    model = llama_cpp.Llama(file, n_ctx=TOKENS, n_batch=TOKENS, logits_all=True, verbose=False, seed=0)
    text = (FOLDER / "english.txt").read_bytes()
    tokens = model.tokenize(text)[:TOKENS]
    model.eval(tokens)
    logits = np.array(model.scores[: TOKENS - 1], np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -logprobs[np.arange(TOKENS - 1), tokens[1:]].mean()
    model.reset()
    beginning = model.tokenize(BEGINNING.encode())
    greedy = [token for token, _ in zip(model.generate(beginning, temp=0), range(NEW_TOKENS), strict=False)]
    return {"tokens": tokens, "loss": round(loss, 5), "greedy": greedy}


if __name__ == "__main__":
    made = f"llama-cpp-python {version('llama-cpp-python')}, {datetime.date.today()}"
    recorded = {"made": made} | {Path(file).name: answers(file) for file in sys.argv[1:]}
    (FOLDER / "recorded.json").write_text(json.dumps(recorded) + "\n")
