"""`paged-kv generate` over JSON lines: samples, seeds, stop texts, preemption, a live view and a trace of pages."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from paged_kv.cli import _run
from paged_kv.engine.sampling import Sampling


@pytest.fixture
def lines(tmp_path, folder, capsys):
    """Runs `generate --input`; exit status, the objects that it prints, and stderr."""

    def lines(records, *args):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
        status = _run(["generate", "--model", str(folder), "--input", str(file), *map(str, args)])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return lines


def by_sample(records):
    return {(record["index"], record.get("sample", 0)): record for record in records}


def test_every_line_has_its_own_options(lines):
    status, records, _ = lines(
        [
            {"prompt": "once upon", "max_tokens": 5},
            {"prompt": "once upon", "max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 4},
            {"prompt": [256, 104, 105]},
        ],
        "--max-new-tokens", 7,
    )  # fmt: skip
    found = by_sample(records)
    assert status == 0
    assert {key: record["tokens"] for key, record in found.items()} == {(0, 0): 5, (1, 0): 9, (1, 1): 9, (2, 0): 7}
    assert found[1, 0]["text"] != found[1, 1]["text"]
    again = by_sample(lines([{"prompt": "once upon", "max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 4}])[1])
    assert [again[0, sample]["text"] for sample in (0, 1)] == [found[1, sample]["text"] for sample in (0, 1)]


@pytest.mark.slow
def test_options_and_lines_say_the_same_of_every_field_of_sampling(lines):
    """Each field, given as an option and in a line, gives one text, which is not the text without it."""
    base = {"temperature": 1.0, "seed": 4, "max_tokens": 24}
    values = {"temperature": 0.6, "top_p": 0.5, "seed": 5, "top_k": 2, "min_p": 0.5, "repetition_penalty": 1.8,
              "presence_penalty": 2, "frequency_penalty": 2, "typical_p": 0.3, "max_tokens": 9}  # fmt: skip
    values |= {"logit_bias": {"64": -100, "68": 100}, "stop_tokens": [68], "stop": "e"}
    (plain,) = lines([{"prompt": "the sea"} | base])[1]
    in_lines = by_sample(lines([{"prompt": "the sea"} | base | {name: value} for name, value in values.items()])[1])
    given = {"max_tokens": "--max-new-tokens", "stop_tokens": "--stop-token"}
    for index, (name, value) in enumerate(values.items()):
        assert in_lines[index, 0]["text"] != plain["text"], name
        if name == "logit_bias":
            value = [f"{token}={bias}" for token, bias in value.items()]
        option = given.get(name, f"--{name.replace('_', '-')}")
        record = {key: number for key, number in base.items() if key != name}
        arguments = [part for each in (value if isinstance(value, list) else [value]) for part in (option, each)]
        (by_option,) = lines([{"prompt": "the sea"} | record], *arguments)[1]
        assert by_option["text"] == in_lines[index, 0]["text"], name
    others = {"ignore_end", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens", "structured_output"}
    assert {*base, *values, *others} == {each.name for each in fields(Sampling)}


def test_log_probabilities_are_part_of_a_record(lines):
    (without, record) = by_sample(lines([{"prompt": "the sea"}, {"prompt": "the sea", "logprobs": 2}])[1]).values()
    assert "logprobs" not in without
    assert len(record["logprobs"]) == record["tokens"]
    for each in record["logprobs"]:
        (first, second) = each["top_logprobs"].items()
        assert (int(first[0]), first[1]) == (each["token"], each["logprob"])  # greedy
        assert second[1] <= first[1] < 0
    (greedy,) = lines([{"prompt": "the sea", "prompt_logprobs": 1, "max_tokens": 2}], "--max-new-tokens", 2)[1]
    of_prompt = greedy["prompt_logprobs"]
    assert all(each["logprob"] <= max(each["top_logprobs"].values()) < 0 for each in of_prompt)
    assert len(of_prompt) > 1


def test_a_stop_text_ends_a_sample_before_it(lines):
    (whole,) = lines([{"prompt": "the sea"}], "--max-new-tokens", 30)[1]
    stop = whole["text"][10:13]
    (record,) = lines([{"prompt": "the sea", "stop": stop}], "--max-new-tokens", 30)[1]
    assert record["text"] == whole["text"][: whole["text"].index(stop)]
    assert record["finish_reason"] == "stop"


def test_bad_lines_are_told_and_the_others_go_on(lines):
    bad = [
        ("{", "no JSON"),
        ("[1]", 'expected an object with a "prompt"'),
        ('{"prompt": 5}', 'expected an object with a "prompt"'),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens: expected at least 1"),
        ('{"prompt": "x", "n": 0}', "n: expected at least 1"),
        ('{"prompt": "x", "temperature": -1}', "temperature: expected 0 or a positive number"),
        ('{"prompt": "x", "colour": 1}', "'colour' is none of prompt, n, namespace"),
        ('{"prompt": [1, 99999]}', "token id 99999"),
        (json.dumps({"prompt": [5] * 5000}), "max_position_embeddings is 4096"),
        ('{"prompt": "x", "namespace": [1]}', "namespace: expected a text"),
        ('{"prompt": "x", "seed": "1"}', "seed: expected an integer"),
        ('{"prompt": "x", "top_k": 1.5}', "top_k: expected an integer"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias: a token: expected an integer"),
        ('{"prompt": "x", "logit_bias": {"300": 1}}', "logit_bias has token id 300; the vocabulary is 0 to 258"),
        ("\x00", "no JSON"),
        ('{"prompt": "\\ud800"}', "is not valid text"),
        ('{"prompt": "x", "regex": "\\ud800"}', "structured_output: the regular expression is not valid text"),
        (
            '{"prompt": "x", "json_schema": {"const": "\\ud800"}}',
            "structured_output: the JSON schema is not valid text",
        ),
        ('{"prompt": "x", "json_schema": {"patternProperties": 5}}', "Expected object for 'patternProperties', got 5"),
    ]
    records = [f"{line}\n" for line, _ in bad]
    status, found, err = lines([{"prompt": "first"}, *records, "\n", {"prompt": "last"}], "--max-new-tokens", 3)
    assert status == 1
    answers = by_sample(found)
    assert answers[0, 0]["tokens"] == answers[len(bad) + 2, 0]["tokens"] == 3
    for index, (_, message) in enumerate(bad, 1):
        assert message in answers[index, 0]["error"]
        assert sum(line.startswith(f"line {index + 1}: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err


def test_few_pages_make_samples_wait_and_change_no_text(lines):
    records = [{"prompt": f"prompt {i} of several", "max_tokens": 30} for i in range(8)]
    plenty = by_sample(lines(records)[1])
    status, found, err = lines(records, "--pages", 8)
    assert status == 0
    assert {key: record["text"] for key, record in by_sample(found).items()} == {
        key: record["text"] for key, record in plenty.items()
    }
    assert int(re.search(r"pages: (\d+) used, of 8", err)[1]) <= 8


def test_a_prompt_that_needs_more_pages_than_there_are_is_refused(lines):
    status, found, _ = lines([{"prompt": "x" * 200}, {"prompt": "y"}], "--pages", 4, "--max-new-tokens", 3)
    answers = by_sample(found)
    assert status == 1
    assert "needs 13 pages of 16, the pool has 4" in answers[0, 0]["error"]
    assert answers[1, 0]["tokens"] == 3


@pytest.mark.slow
def test_prompts_come_from_stdin(folder):
    command = [sys.executable, "-c", "from paged_kv.cli import main; main()"]
    done = subprocess.run(
        [*command, "generate", "--model", folder, "--input", "-", "--max-new-tokens", "4"],
        input='{"prompt": "hello"}\n{"prompt": "again"}\n',
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == [0, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--input", "missing.jsonl"], "--input missing.jsonl: cannot be read"),
        (["--input", "a", "--prompt", "b"], "give prompts by --prompt or by --input, one of the two"),
        ([], "give prompts by --prompt or by --input, one of the two"),
    ],
)
def test_where_prompts_come_from_is_said_once(folder, capsys, args, message):
    assert _run(["generate", "--model", str(folder), *args]) == 2
    assert message in capsys.readouterr().err


def test_samples_of_a_prompt_come_under_headings(folder, capsys):
    args = ["--prompt", "a", "--n", "2", "--max-new-tokens", "5", "--temperature", "1"]
    assert _run(["generate", "--model", str(folder), *args]) == 0
    out = capsys.readouterr().out
    assert out.startswith("=== prompt 1, sample 1: a\n")
    assert "\n=== prompt 1, sample 2: a\n" in out


def test_a_trace_tells_what_happened_to_every_page(lines, tmp_path):
    trace = tmp_path / "trace.jsonl"
    records = [{"prompt": "the same beginning of several prompts, and then " + end, "n": 2} for end in "abc"]
    assert lines(records, "--trace", trace, "--max-new-tokens", 20)[0] == 0
    head, *events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert (head["format"], head["page_size"]) == ("paged-kv page events 1", 16)
    assert (head["cache_dtype"], head["page_bytes"]) == ("float32", 16 * 2 * 4 * 2 * 32 * 4)
    assert {event["event"] for event in events} >= {"allocated", "shared", "stored", "released", "copied"}
    owners = {}
    for event in events:
        for page in event["pages"][-1:] if event["event"] == "copied" else event["pages"]:
            if event["event"] in ("allocated", "shared", "hit", "copied"):
                owners.setdefault(page, set()).add(event["request"])
            if event["event"] == "released":
                owners[page].discard(event["request"])
    times = [event["seconds"] for event in events]
    assert times == sorted(times)
    assert max(owners) < head["pages"]


def test_a_trace_that_cannot_be_written_is_one_line(lines, tmp_path):
    status, _, err = lines([{"prompt": "x"}], "--trace", tmp_path / "missing" / "trace")
    assert status == 2
    assert "--trace" in err
    assert "cannot be written" in err


def test_the_live_view_shows_requests_pages_and_tokens(lines):
    status, found, err = lines([{"prompt": "x"}], "--live", "--max-new-tokens", 40)
    assert (status, len(found)) == (0, 1)
    for word in ("requests", "pages", "tokens", "preemptions", "used", "cached", "free"):
        assert word in err
