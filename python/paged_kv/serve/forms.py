"""Forms of served texts: `response_format`, and calls of tools.

The API's process compiles a request's form, so that what cannot be compiled is a 400; MAX hands the text of the form on
to the model's process, which masks logits before MAX's sampler sees them. MAX's own grammars have no part in it: its
configuration refuses them on a CPU, and both processes take its flag for off, but for one look of the API (`allow`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from max.pipelines.context import TextContext
from max.pipelines.context.logit_processors_type import ProcessorInputs

from paged_kv.errors import ContractError
from paged_kv.forms import CompiledForm, Form, Grammar, JsonSchema

NEVER = np.float32(-1e30)
"""The logit of a token that may not come: its probability is 0, and its log-probability still a number of JSON."""


def form_of(context: TextContext) -> Form | None:
    """What a request's text must be.

    Raises:
        ContractTypeError, ContractError: it is no schema, or too large or too deep.
    """
    if context.grammar is not None:
        return Grammar(context.grammar) if context.grammar_enforced else None
    return None if context.json_schema is None else JsonSchema(context.json_schema)


def allow(state: Any) -> None:
    """Lets `response_format` through MAX's API, of whose application this is the state.

    The API looks at the flag of its own copy of the configuration; the model's process has got another one.
    """
    config = state.pipeline_config
    sampling = config.sampling.model_copy(update={"enable_structured_output": True})
    state.pipeline_config = config.model_copy(update={"sampling": sampling})


class FormMask:
    """Lets a request's form choose among its next tokens: one of MAX's processors of logits.

    What the form has seen follows from the request's tokens, so a step may be run again, a prompt may come in pieces,
    and a request that gave its pages back goes on: MAX takes what it has said for a part of its prompt then.

    Args:
        compiled: The form.
        context: The request, before its first token.
    """

    def __init__(self, compiled: CompiledForm, context: TextContext) -> None:
        self._state = compiled.begin(frozenset(context.eos_tracker.eos_token_ids))
        self._seen = len(context.tokens)
        self._allowed = self._state.ends
        self._is_whole = False

    def __call__(self, inputs: ProcessorInputs) -> None:
        """Masks the logits of the last row, in place.

        Raises:
            ContractError: no token continues the form, or a limit of the library was reached.
        """
        for token in inputs.context.tokens.all[self._seen :]:
            self._is_whole = self._state.push(int(token))
            self._seen += 1
        self._allowed = self._state.ends if self._is_whole else self._state.allowed()
        row = inputs.logits.to_numpy()[-1]
        scores = row[self._allowed]
        if not scores.size or not np.isfinite(scores.max()):
            raise ContractError("no token continues a form, or its logits are no numbers")
        row[:] = NEVER
        row[self._allowed] = scores

    def has_allowed(self, token: int) -> bool:
        """Whether a token is one of those that the last mask let through."""
        return bool(np.isin(token, self._allowed))


def mask_of(context: TextContext) -> FormMask | None:
    """The mask that `ServedPipeline` has given a request."""
    return next((each for each in context.sampling_params.logits_processors or () if isinstance(each, FormMask)), None)
