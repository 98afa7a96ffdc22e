"""MAX's tokenizer, in the process of the API: it refuses requests that would end the model's process."""

from __future__ import annotations

from typing import Any

from max.pipelines.context import TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import PipelineConfig, TextTokenizer
from max.pipelines.modeling.types import TextGenerationRequest


class ServedTokenizer(TextTokenizer):
    """Refuses what MAX lets through and its step cannot compute: an `InputError`, which the API answers with 400."""

    def __init__(self, model_path: str, pipeline_config: PipelineConfig, **options: Any) -> None:
        super().__init__(model_path, pipeline_config, **options)
        config = pipeline_config.model.huggingface_config
        rows = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
        self._vocab_size = rows or self.tokenizer_vocab_size
        self._has_prompt_logits = pipeline_config.model.enable_echo

    async def new_context(self, request: TextGenerationRequest) -> TextContext:
        """The request, with no more of `top_k` than there are tokens.

        Raises:
            InputError: its tokens are none of the vocabulary, or it wants log-probabilities that are not computed.
        """
        if isinstance(request.prompt, list):
            self._check_tokens(request.prompt)
        if request.echo and request.logprobs and not self._has_prompt_logits:
            raise InputError("log-probabilities of the prompt (echo and logprobs) need a server with --enable-echo")
        context = await super().new_context(request)
        # MAX's sampler allocates memory for this many tokens: a request for 2^31 ends the model's process.
        context.sampling_params.top_k = min(context.sampling_params.top_k, self._vocab_size)
        return context

    def _check_tokens(self, tokens: list[Any]) -> None:
        if not tokens:
            raise InputError("the prompt has no tokens")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise InputError(f"the prompt has token {token}, the vocabulary is 0 to {self._vocab_size - 1}")
