"""Texts of a form over HTTP, on the demo's model, which knows no JSON: what ended by itself is valid."""

import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_kv.engine.demo_model import FOLDER
from support import serving
from support.form_cases import HOSTILE, schemas

serving.require()
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import numpy as np  # noqa: E402
import openai  # noqa: E402
import tokenizers  # noqa: E402
from max.driver import Buffer  # noqa: E402
from max.pipelines.context import GenerationStatus, TextContext, TokenBuffer  # noqa: E402
from max.pipelines.context.eos_tracking import EOSTracker  # noqa: E402
from max.pipelines.context.logit_processors_type import ProcessorInputs  # noqa: E402

from paged_kv.checkpoint.config import load_config  # noqa: E402
from paged_kv.errors import ContractError  # noqa: E402
from paged_kv.forms import Forms, JsonSchema  # noqa: E402
from paged_kv.serve import pipeline  # noqa: E402
from paged_kv.serve.forms import FormMask, mask_of  # noqa: E402
from paged_kv.serve.tools import HermesParser  # noqa: E402
from support.guarded_server import guarded  # noqa: E402

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}},
    "required": ["x", "s"],
    "additionalProperties": False,
}
PRIMES = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}
"""Minutes of compiling."""
NAMES = {"enum": ["Moses, Aaron", "Aaron and Moses"]}


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Ur", "Tyre"]}, "day": {"$ref": "#/$defs/day"}},
    "required": ["city", "day"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TEMPLATE = """{{ bos_token }}{% if tools %}Call by <tool_call>{...}</tool_call>: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("forms")
    shutil.copytree(FOLDER, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with guarded(folder, model=str(folder / "model")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key=server.key, max_retries=0, timeout=serving.ANSWER_SECONDS)


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def ask(client, text, wanted=None, **options):
    options = {"max_tokens": 120, "temperature": 0} | options
    given = {} if wanted is None else {"response_format": wanted}
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="demo", messages=messages, **given, **options)


def is_valid(schema, text):
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(json.loads(text))


def test_what_ended_by_itself_is_valid(client):
    asked = schemas(200)[::4]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda case: ask(client, f"{case[0]}", form(case[1]), temperature=1.5), enumerate(asked))
        )
    finished = 0
    for schema, answer in zip(asked, answers, strict=True):
        (choice,) = answer.choices
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            finished += 1
            assert is_valid(schema, choice.message.content), (schema, choice.message.content)
    assert finished > 30


def test_requests_of_one_batch_have_each_its_own_form_or_none(client):
    """The same texts as alone, in streams too; a prompt of several pieces, and one whose end comes by length."""
    asked = [("a", form(POINT), 150), ("b", form(NAMES), 60), ("c", None, 40), ("d " * 400, form(NAMES), 60)]
    asked += [("e", {"type": "json_object"}, 40), ("f", form(POINT), 3), ("g", form(True), 40)]
    alone = [ask(client, text, wanted, max_tokens=most).choices[0] for text, wanted, most in asked]

    def stream(case):
        pieces = [piece.choices[0] for piece in ask(client, *case[:2], max_tokens=case[2], stream=True)]
        return "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason

    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(stream, asked))
    assert together == [(choice.message.content, choice.finish_reason) for choice in alone]
    assert is_valid(NAMES, alone[1].message.content)
    assert is_valid(NAMES, alone[3].message.content)
    assert alone[5].finish_reason == "length"


def test_log_probabilities_are_numbers(client):
    (choice,) = ask(client, "x", form(NAMES), logprobs=True, top_logprobs=5).choices
    assert "".join(entry.token for entry in choice.logprobs.content) in ('"Moses, Aaron"', '"Aaron and Moses"')
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "format": "weird"}}}, "at #/properties/a: "),
        ({"type": "array", "items": {"not": {}}}, "at #/items: "),
        (False, "at #"),
        ({"$ref": "#/$defs/no"}, "cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_told_with_its_place(client, schema, place):
    with pytest.raises(openai.BadRequestError, match=place):
        ask(client, "x", form(schema))


@pytest.mark.parametrize("name", [{"stop": ["}"]}, {"extra_body": {"ignore_eos": True}}])
def test_what_would_end_a_text_elsewhere_is_refused(client, name):
    with pytest.raises(openai.BadRequestError, match="do not go with a form"):
        ask(client, "x", form(POINT), **name)


def test_what_is_hostile_is_refused_while_others_go_on(client):
    answered, refused = [], threading.Event()

    def go_on():
        while not refused.is_set():
            assert ask(client, "x", max_tokens=4).choices[0].finish_reason == "length"
            answered.append(time.monotonic())

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(go_on), pool.submit(go_on)]
        try:
            for schema in (PRIMES, HOSTILE["circle of allOf"], HOSTILE["unsatisfiable"]):
                with pytest.raises(openai.BadRequestError):
                    ask(client, "x", form(schema))
        finally:
            refused.set()
        for other in others:
            other.result(serving.ANSWER_SECONDS)
    assert time.monotonic() - began < 60
    assert len(answered) > 4


def random_logits(seed):
    return Buffer.from_numpy(np.random.default_rng(seed).standard_normal((2, 2048), np.float32))


@pytest.fixture(scope="module")
def compiled():
    return Forms(tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))).compile(JsonSchema(POINT))


@pytest.fixture
def context(compiled):
    """A request with a mask, before its first token."""
    (end,) = load_config(FOLDER).eos_token_ids
    tokens = TokenBuffer(np.array([5, 6, 7]))
    context = TextContext(max_length=400, tokens=tokens, eos_tracker=EOSTracker(eos_token_ids={end}))
    context.sampling_params.logits_processors = [FormMask(compiled, context)]
    return context


def test_a_form_goes_on_where_a_step_is_run_again_and_where_pages_were_given_back(context):
    mask = mask_of(context)
    while not context.is_done:
        for _ in range(2):  # as a step that raised for another request
            logits = random_logits(len(context.tokens))
            mask(ProcessorInputs(logits, context))
        token = int(logits.to_numpy()[-1].argmax())
        assert mask.has_allowed(token)
        context.update(token)
        if len(context.tokens) % 7 == 0:
            context.reset()  # MAX's, of a request that gives its pages back
    tokens = [int(token) for token in context.tokens.all[3:]]
    assert is_valid(POINT, tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).decode(tokens))


def test_what_goes_wrong_within_a_form_ends_its_request(context):
    mask = mask_of(context)
    nothing = Buffer.from_numpy(np.full((1, 2048), -np.inf, np.float32))
    with pytest.raises(ContractError, match="no token continues a form"):
        mask(ProcessorInputs(nothing, context))
    mask(ProcessorInputs(random_logits(0), context))
    context.update(next(token for token in range(300) if not mask.has_allowed(token)))
    answered = {context.request_id: context.to_generation_output()}
    assert pipeline._broken([context], answered)[context.request_id].final_status == GenerationStatus.CANCELLED
    with pytest.raises(ContractError, match="breaks its form"):
        mask(ProcessorInputs(random_logits(1), context))


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_are_asked_for_have_their_tools_arguments(client, choice, stream):
    """In a stream too, whose pieces are the call."""
    schemas = {"weather": WEATHER, "point": POINT}
    options = {"tools": [tool(*each) for each in schemas.items()], "tool_choice": choice, "stream": stream}
    answer = ask(client, "x", temperature=1.5, seed=5, **options)
    if stream:
        pieces = [piece.choices[0] for piece in answer]
        reason, calls = pieces[-1].finish_reason, {}
        for call in (call for piece in pieces for call in piece.delta.tool_calls or ()):
            found = calls.setdefault(call.index, [call.function.name, ""])
            found[1] += call.function.arguments or ""
        calls = list(calls.values())
    else:
        reason = answer.choices[0].finish_reason
        calls = [[call.function.name, call.function.arguments] for call in answer.choices[0].message.tool_calls]
    assert reason in ("tool_calls", "length")
    for name, arguments in calls[: len(calls) if reason == "tool_calls" else -1]:
        assert is_valid(schemas[name], arguments), arguments
    if choice != "required":
        assert (reason, [name for name, _ in calls]) == ("tool_calls", ["weather"])


def test_tools_that_may_be_called_or_not(client):
    """Without a form the text is the model's own; with one it is a call or has the form."""
    options = {"tools": [tool("go", {"additionalProperties": False})], "max_tokens": 100}
    plain = ask(client, "x", **options).choices[0]
    assert (plain.finish_reason, plain.message.tool_calls) == ("length", None)
    either = ask(client, "x", form(NAMES), **options).choices[0]
    assert either.message.tool_calls or is_valid(NAMES, either.message.content)


def test_a_tool_whose_arguments_cannot_be_kept_is_named(client):
    tools = [tool("weather", WEATHER), tool("odd", {"type": "object", "properties": {"a": {"not": {}}}})]
    with pytest.raises(openai.BadRequestError, match=r"tool odd: .* at #/properties/a: "):
        ask(client, "x", tools=tools, tool_choice="required")


def test_calls_are_found_in_a_text_whole_and_in_pieces():
    text = 'so <tool_call>\n{"name": "f", "arguments": {"a": {"b": "}"}}}\n</tool_call>\n'
    text += '<tool_call>{"arguments": {}, "name": "g"}</tool_call><tool_call>no JSON</tool_call>'
    expected = [("f", '{"a": {"b": "}"}}'), ("g", "{}")]
    parsed = HermesParser().parse_complete(text)
    assert (parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]) == ("so", expected)
    for seed in range(30):
        parser, dice, rest, found = HermesParser(), random.Random(seed), text, []
        while rest:
            size = dice.randint(1, 12)
            found += parser.parse_delta(rest[:size]) or []
            rest = rest[size:]
        assert "".join(each.content or "" for each in found) == "so "
        calls = [[each for each in found if each.index == index] for index in (0, 1)]
        joined = [
            tuple("".join(filter(None, part)) for part in ((c.name for c in call), (c.arguments for c in call)))
            for call in calls
        ]
        assert joined == expected
