"""The model as requests are read for it: its name, its tokens, its chat format. Its weights are not read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.source import Source
from paged_kv.engine.requests import check_prompt
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.serve.fields import FieldError, Fields

if TYPE_CHECKING:
    from paged_kv.serve.chat import ChatFormat

CHARACTERS = 16
"""Characters of a prompt for each token of the longest request: more are not split into tokens."""
_USUAL_CHARACTERS = 4
"""The same as texts have it."""


class UnknownModel(FieldError):
    """Another model is asked for."""

    code = "model_not_found"


class ContextExceeded(FieldError):
    """A prompt is too long, told in the words by which clients of OpenAI's know it.

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
        """The words by which clients of Anthropic's know it; an answer has a token."""


class ServedModel:
    """A checkpoint as clients ask for it.

    Args:
        source: The checkpoint.
        name: By which clients ask for it.
        most_tokens: The largest number of tokens of a request, its prompt included.
        template: A chat template in place of the checkpoint's.
        sampling: Fields of `Sampling` that requests have which leave them out.

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
    ) -> None:
        from paged_kv.serve.chat import ChatFormat

        self.name, self.config = name, source.config
        self.most_tokens = min(most_tokens, source.config.max_position_embeddings)
        self.created = int(time.time())
        self.sampling = sampling or {}
        self.tokenizer = Tokenizer(source, source.config)
        self.chat: ChatFormat | None = ChatFormat.read(source, self.tokenizer, template)
        self.token_text = lru_cache(4096)(self.tokenizer.token_text)
        """The text of a token inside a text, of special tokens too."""

    def check_name(self, body: Fields) -> None:
        """Refuses a body that asks for another model. Raises UnknownModel."""
        asked = body.text("model", self.name)
        if asked != self.name:
            raise UnknownModel("model", f"{printable(repr(asked))} is not served here; {self.name!r} is")

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
            raise FieldError(name, f"must be a text or a list of token ids, not {shown(prompt)}")
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

    def describe(self) -> dict[str, Any]:
        """The model in the words of /v1/models."""
        said = {"id": self.name, "object": "model", "created": self.created, "owned_by": "paged-kv"}
        return said | {"max_model_len": self.most_tokens}

    def token_length(self, token: int) -> int:
        """Characters of a token in a text: none of a special one."""
        return len(self.token_text(token)) if self.text([token]) else 0

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.tokenizer.decode(list(tokens))
