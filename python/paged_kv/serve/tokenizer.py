"""MAX's tokenizer, in the API process: it refuses requests that would end the worker, and says which one raised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from max.pipelines.context import TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import PipelineConfig, TextTokenizer
from max.pipelines.modeling.types import TextGenerationRequest

from paged_kv.errors import ContractError, PagedKVError, ToolchainError
from paged_kv.forms import CompiledForm, Form, Forms, JsonSchema
from paged_kv.serve.forms import form_of

FAILED_TOKEN = -1
"""Says from the worker to the API process that a request failed; no token has this id."""


CHARACTERS_PER_TOKEN = 16
"""A text with more for each token of the longest request is refused before it is split: text has some 4."""
LARGE_TEXT = 1 << 14
"""Characters. Texts of more are split one at a time: each takes memory of a hundred times its size meanwhile."""


SECONDS_TO_COMPILE = 1
"""Of a form, CPU time: the model's process compiles it within a step, for which all requests wait."""


class StepFailed(RuntimeError):
    """The step of a request raised. MAX answers this with 500; to a `ValueError` of a decoder it would say 400."""


class ServedTokenizer(TextTokenizer):
    """Refuses what MAX lets through and its step cannot compute: an `InputError`, which the API answers with 400."""

    def __init__(self, model_path: str, pipeline_config: PipelineConfig, **options: Any) -> None:
        super().__init__(model_path, pipeline_config, **options)
        config = pipeline_config.model.huggingface_config
        rows = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
        self._vocab_size = rows or self.tokenizer_vocab_size
        self._has_prompt_logits = pipeline_config.model.enable_echo
        self._large = asyncio.Lock()
        self._compiles = asyncio.Lock()

    async def new_context(self, request: TextGenerationRequest) -> TextContext:
        if isinstance(request.prompt, list):
            self._check_tokens(request.prompt)
        if request.echo and request.logprobs and not self._has_prompt_logits:
            raise InputError("log-probabilities of the prompt (echo and logprobs) need a server with --enable-echo")
        context = await super().new_context(request)
        # MAX's sampler allocates memory for this many tokens: a request for 2^31 ends the worker.
        context.sampling_params.top_k = min(context.sampling_params.top_k, self._vocab_size)
        try:
            if form := form_of(context):
                async with self._compiles:  # one at a time: some take a second, in a process of their own
                    await asyncio.to_thread(self._check_form, form, context, request)
        except PagedKVError as error:
            raise InputError(str(error)) from None
        return context

    @cached_property
    def forms(self) -> Forms:
        """Compiles forms for its vocabulary: half a second for a large one, the first time.

        Raises:
            ToolchainError: as `Forms`, or the tokenizer is written in Python.
        """
        tokenizer = getattr(self.delegate, "backend_tokenizer", None)
        if tokenizer is None:
            raise ToolchainError("form: forms need a tokenizer.json")
        return Forms(tokenizer, SECONDS_TO_COMPILE)

    def compiled(self, form: Form) -> CompiledForm:
        """A form, compiled, or known from a request before. Raises as `Forms.compile`."""
        return _compiled(self.forms, form)

    def _check_form(self, form: Form, context: TextContext, request: TextGenerationRequest) -> None:
        """Refuses a form that cannot be compiled, and what would end its text elsewhere.

        Raises:
            ContractError, ToolchainError: as `Forms`; the message says where, in a tool's parameters by its name.
        """
        asked = request.sampling_params
        if asked.stop or asked.stop_token_ids or asked.ignore_eos:
            raise ContractError("form: stop, stop_token_ids and ignore_eos do not go with a form, which ends its text")
        try:
            compiled = self.compiled(form)
        except ContractError:
            for tool in request.tools or () if context.grammar else ():  # a smaller part, whose place has a name
                try:
                    self.compiled(JsonSchema(tool["function"]["parameters"]))
                except ContractError as error:
                    raise ContractError(f"tool {tool['function']['name']}: {error}") from None
            raise
        if not compiled.begin(frozenset(context.eos_tracker.eos_token_ids)).ends.size:
            raise ContractError("form: the model has no end token, so nothing would end its text")

    async def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> Any:
        """The tokens of a text, or the tokens that were given.

        Raises:
            InputError: it has more characters than `CHARACTERS_PER_TOKEN` allow, or more tokens than a request may.
        """
        size = len(prompt) if isinstance(prompt, str) else 0
        if self.max_length and size > CHARACTERS_PER_TOKEN * self.max_length:
            raise InputError(
                f"the prompt has {size} characters, which is too long for requests of {self.max_length} tokens:"
                f" {CHARACTERS_PER_TOKEN} for each token is the limit"
            )
        async with self._large if size > LARGE_TEXT else nullcontext():
            return await super().encode(prompt, add_special_tokens)

    async def decode(self, encoded: Any, **kwargs: Any) -> str:
        """The text of tokens.

        MAX's result of a step has no field for an error, so `FAILED_TOKEN` travels as the token of a log-probability:
        those are decoded here one by one, while text goes past this function.

        Raises:
            StepFailed: it is `FAILED_TOKEN`.
        """
        if np.ndim(encoded) == 0 and encoded == FAILED_TOKEN:
            raise StepFailed("the step of this request raised an error, which is in the log of the server")
        return await super().decode(encoded, **kwargs)

    def _check_tokens(self, tokens: list[Any]) -> None:
        if not tokens:
            raise InputError("the prompt has no tokens")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise InputError(f"the prompt has token {token}, the vocabulary is 0 to {self._vocab_size - 1}")


@lru_cache(16)
def _compiled(forms: Forms, form: Form) -> CompiledForm:
    return forms.compile(form)
