"""Speculative decoding: tokens are drafted from the text so far, and one step of the model verifies up to eight.

The text is that of plain greedy decoding, which takes a step for each token.
"""

from paged_kv.engine import Engine, Sampling, load
from paged_kv.engine.demo_model import FOLDER

PROMPT = "In the beginning God created the heaven and the earth. In the beginning God created"
NEW_TOKENS = 64


def generate(engine: Engine) -> str:
    """The greedy text after the prompt."""
    return "".join(output.text for output in engine.stream(PROMPT, Sampling(NEW_TOKENS)))


def main() -> None:
    plain, speculative = load(FOLDER, num_pages=32), load(FOLDER, num_pages=32, speculate="lookup")
    text = generate(speculative)
    print(text)
    print("plain decoding gives the same text:", generate(plain) == text)
    counts = speculative.statistics
    print("tokens were drafted and accepted:", counts.draft_tokens >= counts.accepted_tokens > 0)


if __name__ == "__main__":
    main()
