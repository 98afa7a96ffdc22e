"""Texts of a structure: those that finish by themselves have it, and what cannot be compiled is refused."""

import builtins
import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from paged_kv.checkpoint.config import load_config
from paged_kv.commands.options import structure_of
from paged_kv.commands.prompts import FIELDS, PromptLine, RefusedLine, encode, read
from paged_kv.engine import Grammar, JsonSchema, Regex, Sampling
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, ToolchainError
from paged_kv.structured_output import MOST_CHARACTERS, StructureCompiler
from support.fake_model import Nonsense
from support.properties import examples
from unit.structure_cases import HOSTILE, VALUES, schemas

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

CONFIG = load_config(FOLDER)
NAME = JsonSchema({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})
POINT_PROPERTIES = {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}}
POINT = JsonSchema(
    {"type": "object", "properties": POINT_PROPERTIES, "required": ["x", "s"], "additionalProperties": False}
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(FOLDER, CONFIG)


def outputs(engine):
    """The text and the last output of each sample."""
    texts, last = {}, {}
    while not engine.is_idle:
        for output in engine.step():
            key = output.request, output.sample
            texts[key] = texts.get(key, "") + output.text
            last[key] = output
        engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    return {key: (texts[key], last[key]) for key in texts}


def is_valid(schema, text):
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(json.loads(text))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_what_finished_is_valid_and_what_was_cut_says_so(tokenizer, temperature):
    engine, asked = Engine(Nonsense(4000), tokenizer), schemas(200)
    for number, schema in enumerate(asked):
        sampling = Sampling(120, temperature=temperature, seed=number, structured_output=JsonSchema(schema))
        assert engine.add_request([1 + number], sampling) == number
    finished = 0
    for (number, _), (text, last) in outputs(engine).items():
        assert last.finish in ("stop", "length"), (asked[number], last.error)
        if last.finish == "stop":
            finished += 1
            assert is_valid(asked[number], text), (asked[number], text)
    assert finished > 150


def test_preempted_forked_and_chunked_samples_get_their_own_texts(tokenizer):
    structures = [NAME, POINT, Regex("[a-c]{3,40}"), None, Grammar('start: "(" start ")" | "x"\n')]
    found = []
    for num_pages in (400, 24):
        engine = Engine(Nonsense(num_pages, 4), tokenizer, max_step_tokens=16)
        for number in range(20):
            sampling = Sampling(
                30, temperature=1.5, seed=number, structured_output=structures[number % 5], top_p=0.9, min_p=0.01
            )
            engine.add_request(list(range(3, 4 + number)), sampling, n=1 + number % 3)
        last_ones = outputs(engine).items()
        found.append({key: (text, replace(last, cached_tokens=0)) for key, (text, last) in last_ones})
    assert engine.preemptions > 5
    assert found[0] == found[1]
    for (number, _), (text, last) in found[0].items():
        if last.finish == "stop" and number % 5 == 2:
            assert re.fullmatch("[a-c]{3,40}", text)
        if last.finish == "stop" and number % 5 == 4:
            assert re.fullmatch(r"\(*x\)*", text)
            assert text.count("(") == text.count(")")
        assert last.finish != "error"


def test_a_structure_that_may_go_on_ends_by_an_end_token_or_at_the_limit(tokenizer):
    (end,) = CONFIG.eos_token_ids
    for ignore_end, reason in ((False, "stop"), (True, "length")):
        bias = {end: 100} if not ignore_end else {}
        engine = Engine(Nonsense(40), tokenizer)
        engine.add_request(
            [5], Sampling(20, structured_output=Regex("aaaa[a-z]*"), logit_bias=bias, ignore_end=ignore_end)
        )
        ((text, last),) = outputs(engine).values()
        assert last.finish == reason
        assert re.fullmatch("aaaa[a-z]*", text)
        assert last.tokens == ((end,) if reason == "stop" else last.tokens)


def test_a_text_that_a_stop_cut_short_is_an_error_and_no_other_request_notices(tokenizer):
    engine = Engine(Nonsense(40), tokenizer)
    engine.add_request([5], Sampling(40, structured_output=NAME, stop='"'))
    engine.add_request([5], Sampling(40, structured_output=Regex("abc"), stop="nothing"))
    engine.add_request([5], Sampling(40, structured_output=Regex("[ab]"), stop_tokens=tokenizer.encode("ab")))
    engine.add_request([5], Sampling(40, structured_output=Regex("[ab]{9}"), stop_tokens=range(2, 1000)))
    (_, cut), (text, whole), (short, inside), (_, too_soon) = outputs(engine).values()
    for last in (cut, too_soon):
        assert (last.finish, last.error) == (
            "error",
            f"request {last.request}: its text ended before its structure did",
        )
    assert (text, whole.finish) == ("abc", "stop")
    assert (short in ("a", "b"), inside.finish) == (True, "stop")


def test_a_library_that_fails_in_between_ends_its_request_alone(tokenizer):
    engine = Engine(Nonsense(40), tokenizer)
    for _ in range(2):
        engine.add_request([5], Sampling(40, structured_output=POINT))
    first = engine._unfinished[0]
    begin = first.structure.begin

    def broken(ends):
        state = begin(ends)
        state._matcher.consume_token(7)  # not what the structure begins with: an error for ever
        return state

    first.structure.begin = broken
    (_, failed), (text, whole) = outputs(engine).values()
    assert failed.finish == "error"
    assert "structure" in failed.error
    assert whole.finish == "stop"
    assert is_valid(json.loads(POINT.schema), text)


FOLLOWED = {
    *("doubling references", "long repetition", "many items"),
    *("automaton of 2^200 states", "nested arrays with bounds", "needs itself"),
}
"""A few milliseconds compile these; their texts are long, or never end."""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_or_followed_within_bounds(tokenizer, name):
    engine, refused = Engine(Nonsense(40), tokenizer), ""
    try:
        engine.add_request([5], Sampling(20, structured_output=JsonSchema(HOSTILE[name])))
    except PagedKVError as error:
        refused = str(error)
    assert len(refused.splitlines()) <= 1
    assert len(refused) < 400
    assert bool(refused) == (name not in FOLLOWED)
    for _, last in outputs(engine).values():
        assert last.finish in ("length", "stop")


@pytest.mark.slow
def test_what_would_end_the_process_or_take_minutes_is_refused(tokenizer):
    chain = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(9000))
    remainders = {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967, 9949, 9941)]}
    for structure in (Grammar(f'start: a0\n{chain}\na9000: "x"\n'), JsonSchema(remainders)):
        with pytest.raises(
            ContractError,
            match=rf"^structured_output: the {structure.KIND} cannot be compiled( at #)?: not within 4 s, 4 GiB of",
        ):
            Engine(Nonsense(4), tokenizer).add_request([5], Sampling(structured_output=structure))


def test_what_was_refused_is_not_tried_again(tokenizer, monkeypatch):
    tried, failed = [], subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: tried.append(1) or failed)
    for _ in range(2):
        with pytest.raises(ContractError, match="ended with -9"):
            Engine(Nonsense(4), tokenizer).add_request([5], Sampling(structured_output=Regex("refused twice")))
    assert len(tried) == 1


def test_errors_name_the_place(tokenizer):
    schema = {"properties": {"ok": {}, "a/b": {"items": {"$ref": "#/$defs/w"}}}, "$defs": {"w": {"format": "weird"}}}
    for bad, message in (
        (JsonSchema(schema), "cannot be compiled at #/$defs/w/format: Unknown format: weird"),
        (JsonSchema({"anyOf": [{"type": "string"}, {"not": {}}]}), 'at #/anyOf/1/not: Unimplemented keys: ["not"]'),
        (JsonSchema({"$ref": "#"}), "cannot be compiled at #/$ref: no token continues it"),
        (Regex("(a"), "the regular expression cannot be compiled: "),
        (Regex("(?=a)b"), "the regular expression cannot be compiled: "),
        (Grammar("start: nothing\n"), "the grammar cannot be compiled: "),
    ):
        with pytest.raises(ContractError, match=re.escape(message)):
            Engine(Nonsense(4), tokenizer).add_request([5], Sampling(structured_output=bad))
    for make, kind in (
        (lambda: JsonSchema("{"), ContractError),
        (lambda: JsonSchema(3), ContractTypeError),
        (lambda: JsonSchema("[]"), ContractTypeError),
        (lambda: JsonSchema({"const": float("nan")}), ContractError),
        (lambda: Regex(b"a"), ContractTypeError),
        (lambda: Grammar("x" * (MOST_CHARACTERS + 1)), ContractError),
        (lambda: Sampling(structured_output="a"), ContractTypeError),
    ):
        with pytest.raises(kind, match=r"^structured_output"):
            make()


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(VALUES)
@example({"patternProperties": 5})
@example({"properties": {"\ud800": {}}})
@example('{"const": "\\ud800"}')
@example({"enum": [float("nan")]})
@example({"maxLength": 10**5000})
@example({1: {}})
@example("\ud800")
def test_any_value_is_a_structure_or_a_typed_refusal(tokenizer, value):
    for kind in (JsonSchema, Regex, Grammar):
        try:
            tokenizer.structure_compiler.compile(kind(value)).begin()
        except (ContractError, ContractTypeError) as error:
            message = str(error)
            assert message.startswith("structured_output: ")
            assert len(message.splitlines()) == 1
            message.encode()


def test_keys_of_a_schema_are_strings():
    """JSON has no others: 1 and "1" would become one."""
    with pytest.raises(ContractError, match="a key of the JSON schema: expected a string, got 1"):
        JsonSchema({"properties": {1: {}, "1": {}}})


def test_without_the_library_or_a_tokenizer_of_that_kind(tokenizer, monkeypatch):
    with pytest.raises(ContractError, match="needs a tokenizer"):
        Engine(Nonsense(4)).add_request([5], Sampling(structured_output=NAME))
    imported = builtins.__import__

    def missing(name, *others):
        if name == "llguidance":
            raise ImportError(name)
        return imported(name, *others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ToolchainError, match=r"llguidance 1\.9 or later, and none is installed"):
        StructureCompiler(tokenizer._tokenizer)


def test_an_older_library_has_other_rules_for_white_space(tokenizer, monkeypatch):
    """Its 1.7 is what vLLM's build for CPUs wants."""
    monkeypatch.setattr("paged_kv.structure_trials.version", lambda _: "1.7.6")
    with pytest.raises(ToolchainError, match=r"llguidance 1\.9 or later, and 1\.7\.6 is installed"):
        StructureCompiler(tokenizer._tokenizer)


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_indented_but_no_white_space_goes_on_for_ever(tokenizer, indent):
    value = {"x": 5, "s": "abc"}
    assert tokenizer.structure_compiler.accepts(POINT, json.dumps(value, indent=indent))
    for endless in ('{\n\n"x":5,"s":"abc"}', '{  "x":5,"s":"abc"}'):
        assert not tokenizer.structure_compiler.accepts(POINT, endless)


def test_a_schema_cannot_turn_refusals_off(tokenizer):
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(ContractError, match="uniqueItems"):
        tokenizer.structure_compiler.compile(JsonSchema(lenient))


def test_json_lines_have_structures(tokenizer, tmp_path: Path):
    lines = [
        {"prompt": "a", "json_schema": {"type": "integer"}},
        {"prompt": "a", "regex": "a+"},
        {"prompt": "a", "json_schema": {"type": "nothing"}},
        {"prompt": "a", "regex": "a", "grammar": "b"},
        {"prompt": "a"},
    ]
    file = tmp_path / "lines"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second, third, fourth, fifth = encode(
        read(str(file), Sampling(structured_output=NAME), 1), tokenizer, CONFIG
    )
    assert first.sampling.structured_output == JsonSchema({"type": "integer"})
    assert second.sampling.structured_output == Regex("a+")
    assert isinstance(third, RefusedLine)
    assert "Invalid type: nothing" in third.error
    assert isinstance(fourth, RefusedLine)
    assert fifth.sampling.structured_output == NAME


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(VALUES, VALUES, VALUES)
def test_no_line_ends_the_others(tokenizer, value, schema, prompt):
    """Whatever JSON the fields of a line hold, it is a request, or refused by one line of text."""
    lines = [{"prompt": prompt}, {"prompt": "a", "json_schema": schema}, value, {"prompt": "a"}]
    lines += [{"prompt": "a", name: value} for name in FIELDS]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(json.dumps(line, skipkeys=True) for line in lines))
        file.flush()
        found = encode(read(file.name, Sampling(), 1), tokenizer, CONFIG)
    assert [line.index for line in found] == list(range(len(lines)))
    assert found[3] == PromptLine(3, "a", Sampling(), tokens=tuple(tokenizer.encode("a")))
    for line in found:
        if isinstance(line, RefusedLine):
            line.error.encode()
            assert len(line.error.splitlines()) == 1


def test_options_of_the_command(tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    assert structure_of(file, None, None) == JsonSchema({"type": "integer"})
    assert structure_of(None, "a+", None) == Regex("a+")
    assert structure_of(None, None, file) == Grammar('{"type": "integer"}')
    assert structure_of(None, None, None) is None
    for arguments, message in (
        ((file, "a", None), "--json-schema or --regex"),
        ((tmp_path / "none", None, None), "--json-schema .*cannot be read"),
        ((tmp_path, None, None), "--json-schema .*cannot be read"),
    ):
        with pytest.raises(ContractError, match=message):
            structure_of(*arguments)
