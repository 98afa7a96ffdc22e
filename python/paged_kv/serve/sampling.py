"""The fields of a body that say how tokens are chosen, for all routes of OpenAI's API."""

from __future__ import annotations

import re
import secrets
from typing import Any

from paged_kv.arguments import shown
from paged_kv.engine.sampling import SERVED, Sampling
from paged_kv.errors import ContractError
from paged_kv.serve.fields import Fields
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import Grammar, JsonSchema, Regex, Structure

MOST_LOGPROBS = 20
"""Most likely tokens beside each token."""
_HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prediction",
)
"""Fields of OpenAI's clients that change no answer."""
REFUSED = (
    *("grammar", "json_schema", "logits_processors", "allowed_token_ids", "bad_words", "use_beam_search"),
    *("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens", "include_stop_str_in_output"),
)
"""Fields of other servers without which the text would be another one than a client relies on."""
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
"""Older names of vLLM's for fields of `structured_outputs`."""


def read_sampling(body: Fields, model: ServedModel, max_tokens: int, **options: Any) -> Sampling:
    """Return how the tokens of a request are chosen. Without a seed it gets one, so that it can be computed again.

    Args:
        body: The body of the request; the model says what it leaves out.
        model: Whose tokens they are.
        max_tokens: New tokens at most.
        options: Fields of `Sampling` that the route has read itself.

    Raises:
        ContractError, ContractTypeError: a value has the wrong type or is out of range.
    """
    for name in SERVED:
        if name in body:
            options.setdefault(name, body.any(name))
    stop_tokens = body.any("stop_token_ids", [])
    if not isinstance(stop_tokens, list) or not all(type(token) is int and token >= 0 for token in stop_tokens):
        raise body.error("stop_token_ids", f"must be a list of token ids, not {shown(stop_tokens)}")
    body.ignore(_HARMLESS)
    options = {"temperature": 1.0, "seed": secrets.randbits(63), **model.sampling, **options}
    sampling = Sampling(
        max_tokens=max_tokens, stop_tokens=stop_tokens, ignore_end=body.flag("ignore_eos", False), **options
    )
    sampling.check_vocabulary(model.config.vocab_size)
    return sampling


def read_structure(body: Fields) -> Structure | None:
    """Return what the text must be, by `response_format`, `structured_outputs` or vLLM's older names.

    Raises:
        FieldError: one of them is malformed, or there are several.
        ContractError, ContractTypeError: as `JsonSchema`, `Regex` and `Grammar`.
    """
    structures: dict[str, Structure] = {}
    if "response_format" in body:
        given = body.object("response_format")
        kind = given.choice("type", ("text", "json_object", "json_schema"))
        if kind == "json_object":
            structures["response_format"] = JsonSchema({"type": "object"})
        elif kind == "json_schema":
            schema = given.object("json_schema")
            schema.ignore(("name", "description", "strict"))
            structures["response_format"] = JsonSchema(schema.any("schema", {}))
            schema.end()
        given.end()
    if "structured_outputs" in body:
        given = body.object("structured_outputs")
        for name in ("json", "regex", "grammar", "choice"):
            if name in given:
                structures[given.path(name)] = _structure(given, name, name)
        if given.flag("json_object", False):
            structures[given.path("json_object")] = JsonSchema({"type": "object"})
        given.end()
    for name, kind in _GUIDED.items():
        if name in body:
            structures[name] = _structure(body, name, kind)
    if len(structures) > 1:
        raise ContractError(f"a text has one structure: {' or '.join(structures)}, not both")
    return next(iter(structures.values()), None)


def read_max_tokens(body: Fields, names: tuple[str, ...], default: int, minimum: int, left: int) -> int:
    """New tokens at most, by the first field that is there, and no more than fit behind the prompt.

    Raises:
        FieldError: it is out of range.
    """
    found = [body.integer(name, None, minimum, 2**63 - 1) for name in names]
    return min(next((value for value in found if value is not None), default), left)


def _structure(body: Fields, name: str, kind: str) -> Structure:
    if kind == "json":
        return JsonSchema(body.any(name))
    if kind == "choice":
        choices = body.any(name)
        if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise body.error(name, f"must be a list of texts, not {shown(choices)}")
        return Regex("|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", each) for each in choices))
    text = str(body.text(name))
    return Regex(text) if kind == "regex" else Grammar(text)
