"""OpenAI's API in words: what a body asks for, and what is answered. It knows neither Ray nor HTTP."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from paged_kv.arguments import integer, shown
from paged_kv.checkpoint.source import open_source
from paged_kv.engine import JsonSchema, Sampling
from paged_kv.engine.requests import check_prompt
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.serve.backend import Job, Piece

MAX_SAMPLES = 16
"""Of a request."""
_CHARACTERS = 16
"""Of a prompt, for each token of the longest request; as `paged-kv serve` has it."""
_RENAMED = {"max_completion_tokens": "max_tokens", "stop_token_ids": "stop_tokens", "ignore_eos": "ignore_end"}
_OWN = frozenset(each.name for each in fields(Sampling)) - {
    *("form", "logprobs", "prompt_logprobs", "min_tokens", "stop_tokens", "ignore_end"),
}
_REFUSED = ("logprobs", "top_logprobs", "echo", "suffix", "tools", "functions", "audio", "min_tokens", "best_of")
"""Fields that would change the answer, and are not there."""
_HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields of OpenAI's clients that change no answer."""
_READ = _OWN | _RENAMED.keys() | {"model", "stream", "stream_options", "n", "user_namespace", "response_format"}


@dataclass(frozen=True)
class Asked:
    """One request of a client."""

    job: Job
    is_chat: bool
    stream: bool
    usage: bool
    """Whether a stream ends with its usage."""


class Reader:
    """Reads bodies for one model.

    Args:
        folder: The checkpoint; its weights are not read.
        name: Of the model, as clients ask for it.
        most_tokens: Of a request, its prompt included: what a replica's pages hold.

    Raises:
        CheckpointError: as `open_source` and `Tokenizer`.
    """

    def __init__(self, folder: Path, name: str, most_tokens: int) -> None:
        source = open_source(folder)
        self.name, self._config, self._folder = name, source.config, source.folder
        self._tokenizer = Tokenizer(source, source.config)
        self._most = min(most_tokens, self._config.max_position_embeddings)

    def read(self, body: bytes, *, is_chat: bool) -> Asked:
        """What a body asks for. A request without a seed gets one, so that it can be computed again.

        Raises:
            ContractTypeError, ContractError: it is no JSON object, a field is unknown, has the wrong type or is out of
                range, or asks for what is not there; another model is asked for.
            CheckpointError: the prompt cannot be split into tokens, or the chat template fails on it.
        """
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"the body is no JSON: {error}") from None
        if not isinstance(asked, dict):
            raise ContractTypeError(f"the body must be an object, not {shown(asked)}")
        asked = {name: value for name, value in asked.items() if value is not None}
        if asked.get("model", self.name) != self.name:
            raise ContractError(f"model {shown(asked['model'])} is not served here; {self.name!r} is")
        for name in _REFUSED:
            if name in asked and asked[name] not in (False, 0, [], ""):
                raise ContractError(f"{name} is not supported")
        prompt = "messages" if is_chat else "prompt"
        if unknown := sorted(asked.keys() - _READ - {prompt, *_HARMLESS, *_REFUSED}):
            raise ContractError(f"{unknown[0]} is no field of this route")
        tokens = self._chat(asked) if is_chat else self._prompt(asked)
        left = self._most - len(tokens)
        if left < 1:
            raise ContractError(f"the prompt has {len(tokens)} tokens; with one more it may have {self._most}")
        sampling = self._sampling(asked, left if is_chat else min(left, 16))
        if sampling.max_tokens > left:
            raise ContractError(
                f"max_tokens is {sampling.max_tokens}; after a prompt of {len(tokens)} tokens {left} fit"
            )
        options = asked.get("stream_options", {})
        usage = isinstance(options, dict) and options.get("include_usage") is True
        namespace = asked.get("user_namespace")
        if not isinstance(namespace, str | None):
            raise ContractTypeError(f"user_namespace must be a string, not {shown(namespace)}")
        job = Job(tokens, sampling, integer("n", asked.get("n", 1), 1, MAX_SAMPLES), namespace)
        return Asked(job, is_chat, asked.get("stream") is True, usage)

    def _prompt(self, asked: Mapping[str, Any]) -> tuple[int, ...]:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt):
            raise ContractError("prompt: several prompts are several requests here")
        if prompt is None:
            raise ContractError("prompt is missing")
        return self._tokens(prompt, is_template=False)

    def _chat(self, asked: Mapping[str, Any]) -> tuple[int, ...]:
        messages = asked.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ContractTypeError("messages must be a list of messages")
        return self._tokens(self._template.render([_message(each) for each in messages]), is_template=True)

    def _tokens(self, prompt: str | list[int], *, is_template: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if len(prompt) > _CHARACTERS * self._most:
                raise ContractError(f"the prompt has {len(prompt)} characters, {_CHARACTERS * self._most} at most")
            prompt = self._tokenizer.encode(prompt, is_template=is_template)
        return check_prompt(self._config, "prompt", prompt)

    def _sampling(self, asked: Mapping[str, Any], most: int) -> Sampling:
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": most}
        for name, value in asked.items():
            own = _RENAMED.get(name, name)
            if own in _OWN or name in _RENAMED:
                options[own] = value
        options.setdefault("seed", secrets.randbits(63))
        form = asked.get("response_format", {"type": "text"})
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            options["form"] = JsonSchema(form["json_schema"].get("schema", {}))
        elif kind == "json_object":
            options["form"] = JsonSchema({"type": "object"})
        elif kind != "text":
            raise ContractError(f"response_format is {shown(form)}; text, json_object and json_schema are there")
        sampling = Sampling(**options)
        sampling.check_vocabulary(self._config.vocab_size)
        return sampling

    @cached_property
    def _template(self) -> _Template:
        return _Template(self._folder)


class _Template:
    """A checkpoint's chat template. Who wrote it is not trusted: it runs in Jinja's sandbox."""

    def __init__(self, folder: Path) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._error = TemplateError
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text())
            alone = folder / "chat_template.jinja"
            text = alone.read_text() if alone.exists() else config.get("chat_template")
        except (OSError, ValueError, AttributeError):
            config, text = {}, None
        if not isinstance(text, str):
            raise ContractError("this model has no chat template: ask for /v1/completions")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            self._text = environment.from_string(text)
        except TemplateError as error:
            raise CheckpointError(f"{folder}: the chat template cannot be read: {error}") from None
        names = ((name, config.get(name)) for name in ("bos_token", "eos_token"))
        self._names = {name: value["content"] if isinstance(value, dict) else value or "" for name, value in names}

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation as a prompt."""
        try:
            return self._text.render(messages=messages, add_generation_prompt=True, **self._names)
        except (self._error, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ContractError(f"messages: the chat template refuses them: {error}") from None

    def _refuse(self, message: str) -> None:
        raise self._error(message)


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ContractTypeError(f"messages: a message has a role and a content, not {shown(given)}")
    content = given.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ContractTypeError(f"messages: a content is text, not {shown(content)}")
    return {"role": given["role"], "content": content}


class Answer:
    """The answer to one request, as it grows."""

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        kind = ("chatcmpl-", "chat.completion") if asked.is_chat else ("cmpl-", "text_completion")
        self._head = {"id": kind[0] + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self._object = kind[1]
        self._texts = [""] * asked.job.n
        self._finished: list[str | None] = [None] * asked.job.n
        self._tokens = 0
        self._told = [False] * asked.job.n

    def add(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The events of some pieces: one for each sample that has new text or ends."""
        texts: dict[int, str] = {}
        for piece in pieces:
            self._tokens += len(piece.tokens)
            self._finished[piece.sample] = piece.finish
            texts[piece.sample] = texts.get(piece.sample, "") + piece.text
        events = []
        for sample, text in texts.items():
            self._texts[sample] += text
            if text or self._finished[sample]:
                events.append(self._event([self._choice(sample, text)]))
        return events

    def last(self) -> list[dict[str, Any]]:
        """The events at the end of a stream."""
        return [self._event([]) | {"usage": self._usage()}] if self._asked.usage else []

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = []
        for sample, text in enumerate(self._texts):
            said: dict[str, Any] = {"text": text}
            if self._asked.is_chat:
                said = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": sample, **said, "logprobs": None, "finish_reason": self._finished[sample]})
        return {**self._head, "object": self._object, "choices": choices, "usage": self._usage()}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.is_chat else self._object
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, sample: int, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self._asked.is_chat:
            delta = {"content": text} if self._told[sample] else {"role": "assistant", "content": text}
            self._told[sample], said = True, {"delta": delta}
        return {"index": sample, **said, "logprobs": None, "finish_reason": self._finished[sample]}

    def _usage(self) -> dict[str, int]:
        prompt = len(self._asked.job.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }
