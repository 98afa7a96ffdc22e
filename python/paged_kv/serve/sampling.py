"""Sampling fields and structures of a body, for all routes that compute tokens."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from paged_kv.arguments import shown
from paged_kv.engine.sampling import SERVED, Sampling
from paged_kv.errors import ContractError
from paged_kv.json_schemas import close
from paged_kv.serve.fields import BodyFields, FieldError
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import Grammar, JsonSchema, Regex, Structure, problem_of

MOST_LOGPROBS = 20
"""The largest number of most likely tokens that an answer has for each token."""
_HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prediction",
)
"""Fields of OpenAI's clients that change no answer."""
REFUSED = (
    *("json_schema", "logits_processors", "allowed_token_ids", "bad_words", "use_beam_search"),
    *("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens", "include_stop_str_in_output"),
)
"""Fields of other servers that would change the text: refused, not ignored."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "grammar": "grammar",
}
"""Older names of vLLM's for fields of `structured_outputs`, and llama.cpp's."""
STRUCTURES = ("response_format", "structured_outputs", *_GUIDED)
"""The fields of `read_structure`: routes with fields of their own for it refuse these."""


def read_sampling(body: BodyFields, model: ServedModel, max_tokens: int, **options: Any) -> Sampling:
    """Return how the tokens of a request are chosen. Without a seed, or with one below 0, it gets
    a random one, so that it can be computed again.

    Args:
        body: The body of the request; the model says what it leaves out.
        model: Whose tokens they are.
        max_tokens: New tokens at most.
        options: fields of `Sampling` that the route has read itself.

    Raises:
        ContractError, ContractTypeError: a value has the wrong type or is out of range.
    """
    for name in SERVED:
        if name in body:
            options.setdefault(name, body.any(name))
    stop_tokens = body.any("stop_token_ids", [])
    if not isinstance(stop_tokens, list) or not all(type(token) is int and token >= 0 for token in stop_tokens):
        raise body.error("stop_token_ids", f"expected a list of token ids, got {shown(stop_tokens)}")
    body.ignore(_HARMLESS)
    if type(seed := options.get("seed")) is int and seed < 0:  # -1 and the like ask for a random one
        del options["seed"]
    options = {"temperature": 1.0, "seed": secrets.randbits(63), **model.sampling, **options}
    sampling = Sampling(
        max_tokens=max_tokens, stop_tokens=stop_tokens, ignore_end=body.flag("ignore_eos", False), **options
    )
    sampling.check_vocabulary(model.config.vocab_size)
    return sampling


def read_structure(body: BodyFields) -> Structure | None:
    """Return what the text must be, by `response_format`, `structured_outputs` or vLLM's older names.

    Raises:
        FieldError: one of them is malformed, or there are several.
        ContractError, ContractTypeError: as `JsonSchema`, `Regex` and `Grammar`.
    """
    structures: dict[str, Structure] = {}
    if "response_format" in body:
        form = body.object("response_format")
        kind = form.choice("type", ("text", "json_object", "json_schema"))
        if kind == "json_object":
            structures["response_format"] = JsonSchema({"type": "object"})
        elif kind == "json_schema":
            schema = form.object("json_schema")
            schema.ignore(("name", "description", "strict"))
            structures[schema.path("schema")] = read_schema(schema, "schema", {})
            schema.end()
        form.end()
    if "structured_outputs" in body:
        outputs = body.object("structured_outputs")
        for name in ("json", "regex", "grammar", "choice"):
            if name in outputs:
                structures[outputs.path(name)] = _structure(outputs, name, name)
        if outputs.flag("json_object", False):
            structures[outputs.path("json_object")] = JsonSchema({"type": "object"})
        outputs.end()
    for name, kind in _GUIDED.items():
        if name in body:
            structures[name] = _structure(body, name, kind)
    if len(structures) > 1:
        raise ContractError(f"{', '.join(structures)}: expected one structure, got {len(structures)}")
    for name, structure in structures.items():
        check_structure(name, structure)
    return next(iter(structures.values()), None)


def read_schema(holder: BodyFields, name: str, default: Any = None) -> JsonSchema:
    """A field that is a schema of an answer: objects have the properties that it names and no others, unless it says
    which. Raises as `read_structure`.
    """
    schema = JsonSchema(holder.any(name) if default is None else holder.any(name, default))
    closed = JsonSchema(close(json.loads(str(schema.schema))))
    # Where only the open one can be enforced, that is better than none.
    return schema if problem_of(closed) and not problem_of(schema) else closed


def check_structure(name: str, structure: Structure) -> None:
    """Refuses a structure that cannot be enforced, by the name of its field. Raises FieldError."""
    if problem := problem_of(structure):
        raise FieldError(name, f"cannot be enforced: {problem}")


def read_max_tokens(body: BodyFields, names: tuple[str, ...], default: int, minimum: int, left: int) -> int:
    """New tokens at most, by the first field that is there, and no more than fit behind the prompt.

    Raises:
        FieldError: it is out of range.
    """
    requested = [body.integer(name, None, minimum, 2**63 - 1) for name in names]
    return min(next((value for value in requested if value is not None), default), left)


def _structure(body: BodyFields, name: str, kind: str) -> Structure:
    if kind == "json":
        return read_schema(body, name)
    if kind == "choice":
        choices = body.any(name)
        if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise body.error(name, f"expected a list of texts, got {shown(choices)}")
        return Regex("|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", each) for each in choices))
    text = str(body.text(name))
    return Regex(text) if kind == "regex" else Grammar(text)
