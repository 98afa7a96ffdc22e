"""The output of `generate`: texts in the order of the prompts, or one JSON object a sample as it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from paged_kv.commands.prompts import PromptLine, RefusedLine
from paged_kv.engine.requests import Output
from paged_kv.engine.sampling import Logprobs
from paged_kv.output import say


@dataclass
class _Sample:
    asked: PromptLine
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    of_prompt: tuple[Logprobs, ...] = ()
    text: str = ""
    waiting: str = ""
    """Text that was not printed yet."""
    done: bool = False

    def heading(self, first: bool) -> str:
        sample = f", sample {self.index + 1}" if self.asked.n > 1 else ""
        return f"{'' if first else chr(10)}=== prompt {self.asked.index + 1}{sample}: {self.asked.prompt}\n"


class Printer:
    """Prints what samples give; one sample's text streams at a time, in order, the text of others is kept until then.

    Args:
        as_json: Whether to print an object for each sample as it ends, in whatever order, instead of texts.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._samples: dict[tuple[int, int], _Sample] = {}
        self._shown: list[_Sample] = []
        self.failed = False
        """True if a prompt was refused, or a sample failed."""

    def expect(self, request: int, asked: PromptLine) -> None:
        """Says that a request of the engine's is this prompt; requests are printed in this order."""
        for index in range(asked.n):
            self._samples[request, index] = _Sample(asked, index)
            self._shown.append(self._samples[request, index])

    def start(self) -> None:
        """Prints the first heading."""
        if not self._as_json:
            self._head(first=True)

    def refuse(self, refused: RefusedLine) -> None:
        """Prints why a prompt does not run."""
        self.failed = True
        say(f"line {refused.index + 1}: {refused.error}")
        click.echo(json.dumps({"index": refused.index, "error": refused.error}, ensure_ascii=False))

    def add(self, output: Output) -> None:
        """Prints what a step gave, as far as its turn has come."""
        sample = self._samples[output.request, output.sample]
        sample.tokens += output.tokens
        sample.logprobs += output.logprobs
        sample.of_prompt += output.prompt_logprobs
        sample.text += output.text
        sample.waiting += output.text
        sample.done = output.finish is not None
        if output.error is not None:
            self.failed = True
            say(f"error: prompt {sample.asked.index + 1}: {output.error}")
        if self._as_json:
            if sample.done:
                self._print_record(sample, output)
            return
        while self._shown:
            current = self._shown[0]
            click.echo(current.waiting, nl=False)
            current.waiting = ""
            if not current.done:
                break
            click.echo()
            del self._shown[0]
            self._head(first=False)

    def tokens(self) -> list[list[int]]:
        """The tokens of all samples, in the order of the prompts."""
        return [sample.tokens for sample in self._samples.values()]

    def _head(self, first: bool) -> None:
        if self._shown and len(self._samples) > 1:
            click.echo(self._shown[0].heading(first), nl=False)

    def _print_record(self, sample: _Sample, output: Output) -> None:
        record: dict[str, Any] = {
            "prompt": sample.asked.prompt,
            "text": sample.text,
            "tokens": len(sample.tokens),
            "finish_reason": output.finish,
            "index": sample.asked.index,
        }
        if sample.asked.n > 1:
            record["sample"] = sample.index
        if sample.logprobs:
            record["logprobs"] = _logprobs(sample.tokens, sample.logprobs)
        if sample.of_prompt:
            record["prompt_logprobs"] = _logprobs(sample.asked.tokens[1:], sample.of_prompt)
        if output.error is not None:
            record["error"] = output.error
        click.echo(json.dumps(record, ensure_ascii=False))


def _logprobs(tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": each.token, "top_logprobs": each.top}
        for token, each in zip(tokens, logprobs, strict=True)
    ]
