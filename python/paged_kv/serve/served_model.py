"""The served model as requests see it: names, tokenizer, limits and chat format, but no weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.embedding_files import Task
from paged_kv.checkpoint.source import Source
from paged_kv.engine.embedding import TextEncoder
from paged_kv.engine.requests import check_prompt
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.serve.fields import BodyFields, FieldError

if TYPE_CHECKING:
    from paged_kv.serve.chat import ChatFormat

CHARACTERS = 16
"""Characters per token of the longest request: a longer prompt is refused before it is split into tokens."""
_USUAL_CHARACTERS = 4
"""Characters per token of usual texts."""


class UnknownModel(FieldError):
    """Another model is asked for."""

    code = "model_not_found"


class ContextExceeded(FieldError):
    """A prompt is too long, in the words that OpenAI's clients recognise.

    Args:
        param: The field of the prompt.
        tokens: Its tokens, or an estimate.
        most: Tokens of the longest request.
        counted: What was counted, in place of the tokens.
    """

    code = "context_length_exceeded"

    def __init__(self, param: str, tokens: int, most: int, counted: str = "") -> None:
        super().__init__(param, "")
        counted = counted or f"{tokens} tokens"
        self.args = (
            f"This model's maximum context length is {most} tokens. However, your {param} resulted in {counted}, and "
            f"an answer has one at least. Please reduce the length of the {param}.",
        )
        self.anthropic = f"prompt is too long: {tokens} tokens > {most - 1} maximum"
        """The words that Anthropic's clients recognise; an answer has a token."""


class AdapterStore(Protocol):
    """The LoRA adapters of an engine; each is served under its name."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        ...

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Loads an adapter. Raises as `Engine.load_adapter`."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""
        ...


class ServedModel:
    """A checkpoint as clients ask for it.

    Args:
        source: The checkpoint.
        name: By which clients ask for it.
        most_tokens: The largest number of tokens of a request, its prompt included.
        template: A chat template in place of the checkpoint's.
        sampling: fields of `Sampling` that requests have which leave them out.
        aliases: Further names of it.
        most_samples: The largest number of samples of a request; None for any.
        encoder: The tokens of texts, of a model that embeds or ranks them.

    Raises:
        CheckpointError: its tokenizer or its chat template cannot be read.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        most_tokens: int,
        template: str | None = None,
        sampling: Mapping[str, float] | None = None,
        *,
        aliases: Sequence[str] = (),
        most_samples: int | None = None,
        encoder: TextEncoder | None = None,
    ) -> None:
        from paged_kv.serve.chat import ChatFormat

        self.name, self.config = name, source.config
        self.names = tuple(dict.fromkeys((name, *aliases)))
        self.store: AdapterStore | None = None
        """The adapters, each served under its name; None where there are none."""
        self.adapter: str | None = None
        """The name of the one that a request asks for."""
        self.most_samples = most_samples
        self.most_tokens = min(most_tokens, source.config.max_position_embeddings)
        self.created = int(time.time())
        self.sampling = sampling or {}
        digest = sha256(f"{version('paged-kv')} {source.config!r}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        """OpenAI's `system_fingerprint`: it changes with the version of this package and with the model."""
        self.tokenizer = Tokenizer(source, source.config) if encoder is None else encoder.tokenizer
        self.encoder = encoder
        self.chat: ChatFormat | None = None
        if encoder is None:
            self.chat = ChatFormat.read(source, self.tokenizer, template)
        self.token_bytes = lru_cache(4096)(self.tokenizer.token_bytes)
        """The bytes of a token inside a text, of special tokens too."""

    @property
    def task(self) -> Task:
        """What the model is for."""
        return "generate" if self.encoder is None else self.encoder.recipe.task

    def check_name(self, body: BodyFields) -> ServedModel:
        """The model by the name that a body asks for, which answers repeat. Raises UnknownModel where it has none."""
        return self.named(str(body.text("model", self.name)))

    def named(self, name: str) -> ServedModel:
        """The model by another of its names. Raises UnknownModel where it is none."""
        if name not in self.served_names:
            names = " or ".join(map(repr, self.served_names))
            raise UnknownModel("model", f"expected {names}, got {printable(repr(name))}")
        named = copy(self)
        named.name = name
        named.adapter = None if name in self.names else name
        return named

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may ask for: the model's, then those of adapters."""
        return self.names if self.store is None else (*self.names, *self.store.adapters)

    def check_samples(self, field: str, prompts: int, n: int) -> None:
        """Refuses a request whose samples the server can never hold at once.

        Args:
            field: The field that holds `n`.
            prompts: Prompts of the request.
            n: Samples of each.

        Raises:
            FieldError: there are more than `most_samples`.
        """
        most = self.most_samples
        if most is None or prompts * n <= most:
            return
        limit = f"the server runs and queues {most} samples at most"
        if prompts > most:
            raise FieldError("prompt", f"expected at most {most} prompts, got {prompts}: {limit}")
        raise FieldError(field, f"expected at most {most // prompts} for {prompts} prompts, got {n}: {limit}")

    def tokens(self, name: str, prompt: Any, *, is_template: bool = False, special: bool = True) -> tuple[int, ...]:
        """The tokens of a prompt that is a text or tokens.

        Args:
            name: The name of the prompt's field.
            prompt: A string or a list of integers.
            is_template: Whether a chat template has written it, with all special tokens.
            special: Whether the tokenizer adds special tokens to a text.

        Raises:
            ContractError, ContractTypeError, CheckpointError: it is neither, too long, or gives no tokens.
        """
        if isinstance(prompt, str):
            most = CHARACTERS * self.most_tokens
            if len(prompt) > most:
                counted = f"{len(prompt)} characters, which is too many"
                raise ContextExceeded(name, len(prompt) // _USUAL_CHARACTERS, self.most_tokens, counted)
            prompt = self.tokenizer.encode(prompt, is_template=is_template or not special)
        elif not isinstance(prompt, list):
            raise FieldError(name, f"expected a text or a list of token ids, got {shown(prompt)}")
        if len(prompt) > self.config.max_position_embeddings:
            raise ContextExceeded(name, len(prompt), self.most_tokens)
        return check_prompt(self.config, name, prompt)

    def left(self, name: str, tokens: Sequence[int]) -> int:
        """New tokens that fit behind a prompt, at least 1.

        Raises:
            ContextExceeded: none does.
        """
        left = self.most_tokens - len(tokens)
        if left < 1:
            raise ContextExceeded(name, len(tokens), self.most_tokens)
        return left

    def describe(self, *, for_anthropic: bool = False) -> dict[str, Any]:
        """The model in the words of OpenAI's /v1/models, or of Anthropic's."""
        if for_anthropic:
            created = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            card: dict[str, Any] = {"type": "model", "id": self.name, "display_name": self.name, "created_at": created}
            return card | {"lifecycle": "active", "max_input_tokens": self.most_tokens, "max_tokens": self.most_tokens}
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "paged-kv"}
        return card | {"max_model_len": self.most_tokens} | ({"parent": self.names[0]} if self.adapter else {})

    def token_text(self, token: int, prefix: str = "") -> str:
        r"""The text of a token inside a text; of a part of a character `prefix` and its bytes, as `\xe2\x80`."""
        own = self.token_bytes(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return prefix + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in own)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.tokenizer.decode(list(tokens))
