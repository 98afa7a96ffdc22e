"""The prompts of a `generate` command: given one by one, or as JSON lines from a file or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from paged_kv.arguments import integer, printable, shown
from paged_kv.engine.engine import MAX_RUNNING
from paged_kv.engine.interfaces import TextCoder, compile_structure
from paged_kv.engine.requests import check_prompt, most_tokens
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError
from paged_kv.files import read_regular
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.pool import pages_needed
from paged_kv.structured_output import Grammar, JsonSchema, Regex, Structure

_OPTIONS = tuple(each.name for each in fields(Sampling) if each.name != "structured_output")
_STRUCTURES: dict[str, Callable[[Any], Structure]] = {"json_schema": JsonSchema, "regex": Regex, "grammar": Grammar}
FIELDS = ("prompt", "n", "namespace", *_OPTIONS, *_STRUCTURES)
"""Fields of a JSON line; all but the prompt may be left out."""


@dataclass(frozen=True)
class PromptLine:
    """One request of the command."""

    index: int
    """Its place among the prompts, or its line, from 0."""
    prompt: str | Sequence[int]
    sampling: Sampling
    n: int = 1
    namespace: str | None = None
    tokens: Sequence[int] = ()
    """The tokens of the prompt, once it was encoded."""

    def pages(self, config: DecoderConfig, page_size: int) -> int:
        """The pages that one sample can need; the last token needs no slot."""
        return pages_needed(most_tokens(config, self.tokens, self.sampling) - 1, page_size)


@dataclass(frozen=True)
class RefusedLine:
    """A prompt that cannot run."""

    index: int
    error: str


Lines = list[PromptLine | RefusedLine]


def lines_of(prompts: Sequence[str], sampling: Sampling, n: int) -> Lines:
    """The requests of `--prompt`: prompt i draws from the streams of seed + i."""
    return [
        PromptLine(index, prompt, replace(sampling, seed=(sampling.seed or 0) + index), n)
        for index, prompt in enumerate(prompts)
    ]


def read(source: str, sampling: Sampling, n: int) -> Lines:
    """The requests of a file of JSON lines, `-` for stdin; `sampling` and `n` are what a line does not say.

    Raises:
        ContractError: the file cannot be read.
    """
    try:
        data = sys.stdin.buffer.read() if source == "-" else read_regular(source)
    except AttributeError:  # Python has none where it is closed
        raise ContractError("--input -: stdin is closed") from None
    except (OSError, ValueError) as error:
        raise ContractError(f"--input {printable(source)}: cannot be read: {error}") from None
    return [
        _or_refused(index, partial(_parse, index, line, sampling, n))
        for index, line in enumerate(data.splitlines())
        if line.strip()
    ]


def encode(lines: Lines, tokenizer: TextCoder, config: DecoderConfig) -> Lines:
    """The lines with the tokens of their prompts; refused where the model cannot take one, or its options."""

    def tokens(line: PromptLine) -> PromptLine:
        line.sampling.check_vocabulary(config.vocab_size)
        compile_structure(tokenizer, line.sampling.structured_output)
        prompt = tokenizer.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt
        return replace(line, tokens=check_prompt(config, f"prompt {line.index}", prompt))

    return [line if isinstance(line, RefusedLine) else _or_refused(line.index, partial(tokens, line)) for line in lines]


def _or_refused(index: int, make: Callable[[], PromptLine]) -> PromptLine | RefusedLine:
    try:
        return make()
    except PagedKVError as error:
        return RefusedLine(index, str(error))


def _parse(index: int, line: bytes, sampling: Sampling, n: int) -> PromptLine:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ContractError(f"no JSON: {printable(error)}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str | list):
        raise ContractTypeError('expected an object with a "prompt", a text or token ids')
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ContractError(f"{printable(repr(unknown[0]))} is none of {', '.join(FIELDS)}")
    namespace: Any = fields.get("namespace")
    if not isinstance(namespace, str | None):
        raise ContractTypeError(f"namespace: expected a text, got {shown(namespace)}")
    options = {name: fields[name] for name in _OPTIONS if name in fields}
    structures = [make(fields[name]) for name, make in _STRUCTURES.items() if fields.get(name) is not None]
    if len(structures) > 1:
        raise ContractError(f"a text has one structure: one of {', '.join(_STRUCTURES)}, not {len(structures)}")
    if structures:
        options["structured_output"] = structures[0]
    return PromptLine(
        index,
        fields["prompt"],
        replace(sampling, **options),
        integer("n", fields.get("n", n), 1, MAX_RUNNING),
        namespace,
    )
