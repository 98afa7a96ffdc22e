"""`paged-kv demo`: what paging is for, shown with a small model that speaks, and the proof that it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from paged_kv.commands.options import (
    device_option,
    load_model,
    print_statistics,
    sampling_options,
    threads_option,
)
from paged_kv.engine.sampling import Sampling
from paged_kv.output import say

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.engine.engine import Engine

PREAMBLE = (
    "And it came to pass in those days, that the king sent messengers unto all the cities of the land, and they"
    " gathered the people together before the house of the LORD. "
)
ENDINGS = ("And the king said", "Then the prophet answered", "And the women", "But the servant")
PROMPT = "In the beginning God created"
NEW_TOKENS = 40
PAGE_SIZE = 16
PAGES = 64
FEW_PAGES = 12


@dataclass
class Answers:
    """The answers of an engine: texts and tokens by request and sample."""

    prompts: list[Sequence[int]] = field(default_factory=list)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)


@click.command()
@threads_option
@device_option
@sampling_options("max_tokens", "logprobs", "prompt_logprobs", temperature=0.8, top_p=0.95, seed=1)
def demo(device: str, **options: Any) -> int:
    """Show shared prefixes, parallel samples and preemption with a small model, and that paging changes no token.

    Options of sampling are those of the parallel samples, part 2.
    """
    from paged_kv.checkpoint.config import load_config
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.engine.engine import Engine
    from paged_kv.engine.step import DEMO_DTYPE
    from paged_kv.engine.tokenizer import Tokenizer
    from paged_kv.engine.uncached_forward import recompute

    say("a Llama of 2 million parameters, trained on the King James Bible (examples/train_demo_model.py)")
    config = load_config(FOLDER)
    tokenizer = Tokenizer(FOLDER, config)
    model = load_model(FOLDER, DEMO_DTYPE.name, PAGES, PAGE_SIZE, device)
    greedy = Sampling(NEW_TOKENS)

    engine = Engine(model, tokenizer)
    click.echo(f"1. Prompts that begin alike share pages of {PAGE_SIZE} tokens\n")
    alike = run(engine, [PREAMBLE + ending for ending in ENDINGS], greedy)
    for ending, text in zip(ENDINGS, alike.texts.values(), strict=True):
        click.echo(f"   {ending}{one_line(text)}")
    total = sum(map(len, alike.prompts))
    click.echo(f"\n   {engine.tokens_found} of {total} prompt tokens were in the cache already: of the first prompt.\n")

    click.echo("2. Samples of one prompt share its pages, and copy one when they write to it\n")
    events: list[str] = []
    engine.pool.listen(lambda event: events.append(event.kind))
    sampled = Sampling(NEW_TOKENS, **options)
    for text in run(engine, [PROMPT], sampled, n=3).texts.values():
        click.echo(f"   {PROMPT}{one_line(text)}")
    click.echo(f"\n   Pages copied: {events.count('copied')}.\n")

    small = Engine(model, tokenizer, num_pages=FEW_PAGES, share_prefixes=False)
    click.echo(f"3. The first prompts again, in {FEW_PAGES} pages: too few for all at once\n")
    again = run(small, [PREAMBLE + ending for ending in ENDINGS], greedy)
    same = sum(text == again.texts[key] for key, text in alike.texts.items())
    click.echo(f"   {small.preemptions} times a prompt gave its pages back and was computed again later.")
    click.echo(f"   Texts that are the same: {same} of {len(alike.texts)}.\n")

    click.echo("4. The tokens of part 1 against a recompute in NumPy, without pages and without a cache\n")
    equal = count = 0
    for prompt, new in zip(alike.prompts, alike.tokens.values(), strict=True):
        logits = recompute(config, model.weights, [*prompt, *new[:-1]])[len(prompt) - 1 :]  # [new tokens, vocab]
        equal += sum(int(row.argmax()) == token for row, token in zip(logits, new, strict=True))
        count += len(new)
    click.echo(f"   paged tokens equal to those of a recompute without a cache: {equal} of {count}")
    print_statistics(engine.statistics, model)
    return 0 if (equal, same) == (count, len(alike.texts)) else 1


def run(engine: Engine, prompts: Sequence[str], sampling: Sampling, n: int = 1) -> Answers:
    """Adds prompts one step after the other, as requests come, and computes until all have ended."""
    answers = Answers()
    waiting = list(prompts)
    while waiting or not engine.is_idle:
        if waiting:
            tokens = engine.encode(waiting.pop(0))
            engine.add_request(tokens, sampling, n)
            answers.prompts.append(tokens)
        for output in engine.step():
            key = output.request, output.sample
            answers.texts[key] = answers.texts.get(key, "") + output.text
            answers.tokens.setdefault(key, []).extend(output.tokens)
    answers.texts = dict(sorted(answers.texts.items()))
    answers.tokens = dict(sorted(answers.tokens.items()))
    return answers


def one_line(text: str) -> str:
    return " / ".join(line for line in text.split("\n") if line)
