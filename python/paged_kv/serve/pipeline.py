"""MAX's text generation pipeline, in which a step that raises ends the requests that made it raise, and no others.

In MAX's own pipeline an exception inside a step leaves the scheduler's loop: the model worker exits, the API server
follows, and every request is lost. An op of `paged_kv` raises `ValueError` where its operands break the contract (a
page id outside the pool, a position outside a request's pages, two rows for one slot) before it writes anything, and
MAX's own step raises for some requests that its API lets through (`tokenizer.py` refuses those that are known).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from max.pipelines.context import GenerationStatus, LogProbabilities, TextContext, TextGenerationOutput
from max.pipelines.lib import PipelineConfig, TextGenerationPipeline
from max.pipelines.modeling.types import RequestID, TextGenerationInputs
from max.pipelines.sampling.sampling_config import ToolCallPolicy

from paged_kv.errors import ToolchainError
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.serve.compiled_graphs import store_for_max
from paged_kv.serve.forms import FormMask, form_of, mask_of
from paged_kv.serve.tokenizer import FAILED_TOKEN, ServedTokenizer

logger = logging.getLogger("max.pipelines")


class ServedPipeline(TextGenerationPipeline[TextContext]):
    """Runs a batch as MAX's pipeline does; where its step raises, runs it again one request at a time.

    To run a request again is safe: it writes the same keys and values to the same slots of its own pages, and tokens,
    grammars and the prefix cache advance only once a step is done. A request that raises alone is answered with the
    API's error 500, and the scheduler frees its pages. It needs `ServedTokenizer` in the API process.
    """

    def __init__(self, pipeline_config: PipelineConfig, *others: Any, **named: Any) -> None:
        apply_cpu_target()  # the process of the model does not import `architectures.py`
        # A parser of tools makes MAX compile a second sampler and its own grammars: forms are ours (`forms.py`).
        policy = {"tool_call_policy": ToolCallPolicy.FORCE_UNCONSTRAINED}
        sampling = pipeline_config.sampling.model_copy(update=policy)
        pipeline_config = pipeline_config.model_copy(update={"sampling": sampling})
        on_the_cpu = all(device.device_type == "cpu" for device in pipeline_config.model.device_specs)
        with store_for_max(on_the_cpu):
            super().__init__(pipeline_config, *others, **named)
        with suppress(ToolchainError):
            self._served_tokenizer.forms  # noqa: B018 (it reads the vocabulary now, not within a step)

    @property
    def _served_tokenizer(self) -> ServedTokenizer:
        return cast(ServedTokenizer, self.tokenizer)

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        requests = inputs.flat_batch
        before = [_progress(context) for context in requests]
        try:
            self._mask(requests)
            outputs = super().execute(inputs)
            return outputs | _broken(requests, outputs)
        except MemoryError:
            raise  # the next step would fail too: a new worker is needed
        except Exception as error:
            if not requests:
                raise
            if len(requests) == 1 or before != [_progress(context) for context in requests]:
                logger.exception("A step raised, given up: %s", ", ".join(str(r.request_id) for r in requests))
                return {context.request_id: _failed(context) for context in requests}
            logger.error("A step of %d requests raised, they are run one at a time: %s", len(requests), error)
        outputs = {}
        for replica, batch in enumerate(inputs.batches):
            for context in batch:
                alone: list[list[TextContext]] = [[] for _ in inputs.batches]
                alone[replica] = [context]
                outputs |= self.execute(replace(inputs, batches=alone))
        return outputs

    def _mask(self, requests: Sequence[TextContext]) -> None:
        """Gives requests whose texts have a form their masks. Raises as `Forms.compile`."""
        for context in requests:
            if mask_of(context) is None and (form := form_of(context)):
                context.sampling_params.logits_processors = [FormMask(self._served_tokenizer.compiled(form), context)]


def _broken(
    requests: Sequence[TextContext], outputs: Mapping[RequestID, TextGenerationOutput]
) -> dict[RequestID, TextGenerationOutput]:
    """Errors in place of tokens that break a form: a sampler may round its way to one whose probability is 0."""
    found = {}
    for context in requests:
        mask = mask_of(context)
        if mask and context.request_id in outputs and not mask.has_allowed(context.last_realized_token):
            logger.error("%s: token %d breaks its form", context.request_id, context.last_realized_token)
            found[context.request_id] = _failed(context)
    return found


def _progress(context: TextContext) -> tuple[int, int]:
    return context.tokens.processed_length, context.tokens.current_position


def _failed(context: TextContext) -> TextGenerationOutput:
    return TextGenerationOutput(
        request_id=context.request_id,
        tokens=[],
        final_status=GenerationStatus.CANCELLED,
        log_probabilities=[LogProbabilities([], [], [FAILED_TOKEN])],
    )
