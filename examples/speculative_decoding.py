"""Speculative decoding with trees: a draft proposes branches, one step of the model checks all of them.

The draft is the model's own first layers, over the same pages. The text is that of plain greedy decoding, which takes
a step for each token.
"""

import tempfile

import numpy as np
from max.dtype import DType

from paged_kv import PagePool, accepted_rows
from paged_kv.engine.demo import byte_tokenizer, write_demo_checkpoint
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import Sampling
from paged_kv.engine.tree_model import TreeModel

PAGE_SIZE, NEW_TOKENS = 16, 48
DRAFT_LAYERS = 3  # of the demo model's four
BRANCHES = (3, 2, 1)  # candidates after the last token, after each of these, and so on


def grow(trees: TreeModel, token: int, cached: int, pages: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose root is the token that was sampled last."""
    tokens, parents, leaves = [token], [-1], [0]
    for branches in BRANCHES:
        logits = trees.step([tokens], [parents], [cached], [pages], draft=True)[0]  # after each row
        best = np.argsort(-logits[leaves], axis=1)[:, :branches]
        rows = [(leaf, int(candidate)) for leaf, of_leaf in zip(leaves, best, strict=True) for candidate in of_leaf]
        leaves = list(range(len(tokens), len(tokens) + len(rows)))
        parents += [leaf for leaf, _ in rows]
        tokens += [candidate for _, candidate in rows]
    return tokens, parents


def generate(trees: TreeModel, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The greedy text after a prompt, and how many tokens each step added to it."""
    pool = PagePool(trees.model.num_pages, PAGE_SIZE)
    pool.start("text", len(prompt))
    chain = list(range(-1, len(prompt) - 1))  # a prompt has no branches: the parent of each token is the one before
    after = trees.step([prompt], [chain], [0], [pool.pages("text")])[0]
    text, cached, added = [int(after[-1].argmax())], len(prompt), []
    largest = 1 + sum(np.cumprod(BRANCHES))
    while len(text) < NEW_TOKENS:
        pool.reserve("text", max(0, cached + largest - pool.length("text")))
        pages = pool.pages("text")
        tokens, parents = grow(trees, text[-1], cached, pages)
        sampled = trees.step([tokens], [parents], [cached], [pages])[0].argmax(axis=1)
        rows = accepted_rows(parents, tokens, sampled)
        trees.keep([rows], [cached], [pages])  # the slots of the other rows will be written again
        cached += len(rows)
        text += [tokens[row] for row in rows[1:]] + [int(sampled[rows[-1]])]
        added.append(len(rows))
    return text[:NEW_TOKENS], added


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_checkpoint(f"{folder}/demo")
        model = DecoderModel.from_folder(checkpoint, dtype=DType.float32, num_pages=16, page_size=PAGE_SIZE)
        tokenizer = byte_tokenizer()
        prompt = tokenizer.encode("the quick brown fox").ids
        outputs = Engine(model).stream(prompt, Sampling(NEW_TOKENS))
        plain = [token for output in outputs for token in output.tokens]
        text, added = generate(TreeModel(model, draft_layers=DRAFT_LAYERS), prompt)
        print(tokenizer.decode(text))
        print(f"{NEW_TOKENS} tokens in {len(added)} steps after the prompt, which added {added}")
        print(f"plain greedy decoding gives the same text: {text == plain}")


if __name__ == "__main__":
    main()
