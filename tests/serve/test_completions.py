"""/v1/completions, asked with OpenAI's own client, against a float64 forward pass and the engine alone."""

import json

import jsonschema
import numpy as np
import pytest

from paged_kv.engine import Sampling
from support.served import LENGTH, PAGE_SIZE

TOLERANCE = 1e-3
"""The tolerance of float32's log-probabilities."""
RAGGED = ["a", "In the beginning", "And God said, " * 3, "and the earth was without form " * 9, "z, " * 100]


def complete(server, prompt, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    return server.client.completions.create(model="demo", prompt=prompt, extra_body=extra, **options)


def text(server, prompt, **overrides):
    return complete(server, prompt, **overrides).choices[0].text


@pytest.mark.parametrize("prompt", RAGGED, ids=len)
def test_greedy_text_is_the_oracles(server, model, prompt):
    (choice,) = complete(server, prompt).choices
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == 16
    model.assert_greedy(choice)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(server, stream):
    texts = ["In the beginning", "And it came to pass"]
    tokens = [list(server.engine.encode(each)) for each in texts]
    alone = [text(server, each) for each in texts]

    def texts_of(prompt, n=1):
        found = {}
        answer = complete(server, prompt, n=n, stream=stream)
        for event in answer if stream else [answer]:
            for choice in event.choices:
                found[choice.index] = found.get(choice.index, "") + choice.text
        return [found[index] for index in sorted(found)]

    assert texts_of(tokens[0]) == alone[:1]
    assert texts_of(texts) == texts_of(tokens) == texts_of([texts[0], tokens[1]]) == alone
    assert texts_of(texts, n=2) == [alone[0]] * 2 + [alone[1]] * 2


def test_a_stream_is_the_answer_in_pieces(server):
    whole = complete(server, "the quick", logprobs=1)
    pieces = list(complete(server, "the quick", logprobs=1, stream=True, stream_options={"include_usage": True}))
    *texts, usage = pieces
    assert len(texts) > 1
    assert "".join(piece.choices[0].text for piece in texts) == whole.choices[0].text
    assert texts[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 16)
    for name in ("tokens", "token_logprobs", "text_offset"):
        of_pieces = [each for piece in texts for each in getattr(piece.choices[0].logprobs, name)]
        assert of_pieces == pytest.approx(getattr(whole.choices[0].logprobs, name))


def test_what_comes_after_the_model_is_the_engines(server):
    """Names of the API are fields of Sampling."""
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 1, "presence_penalty": 0.5}
    own = {"top_k": 20, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1, "min_tokens": 6}
    sampling = Sampling(24, stop_tokens=[7], ignore_end=True, logit_bias={"9": 4}, **options, **own)
    expected = [out.tokens[0] for out in server.engine.stream("the quick", sampling)]
    extra = own | {"stop_token_ids": [7], "ignore_eos": True}
    (choice,) = complete(server, "the quick", max_tokens=24, logit_bias={"9": 4}, extra_body=extra, **options).choices
    assert choice.token_ids == expected


def test_no_end_comes_before_min_tokens(server):
    whole = complete(server, "the quick", max_tokens=12).choices[0]
    third, before = whole.token_ids[2], whole.token_ids[:2]
    assert third not in before
    for count in (2, 3):
        (choice,) = complete(
            server, "the quick", max_tokens=12, extra_body={"stop_token_ids": [third], "min_tokens": count}
        ).choices
        assert (choice.token_ids[:3] == whole.token_ids[:3]) == (count == 2)
        assert third not in choice.token_ids[:count]
    stop = whole.text[2:4]
    late = text(server, "the quick", max_tokens=12, stop=stop, extra_body={"min_tokens": 8})
    assert late.startswith(whole.text[: len(late)])
    assert stop in late


@pytest.mark.parametrize("max_tokens", [12, 13, 10**9])
def test_what_does_not_fit_behind_a_prompt_ends_by_length(server, max_tokens):
    (choice,) = complete(server, [5] * (LENGTH - 12), max_tokens=max_tokens, extra_body={"ignore_eos": True}).choices
    assert (len(choice.token_ids), choice.finish_reason) == (12, "length")


def test_stop_texts_are_left_out(server):
    whole = text(server, "the quick", max_tokens=40)
    stop = whole[11:13]
    (choice,) = complete(server, "the quick", max_tokens=40, stop=[stop, "\0"]).choices
    assert (choice.finish_reason, choice.text) == ("stop", whole[: whole.index(stop)])


def test_a_seed_decides_the_samples(server):
    options = {"temperature": 1.0, "max_tokens": 32, "n": 2}
    first, again, other = (
        [choice.text for choice in complete(server, "the quick", seed=seed, **options).choices] for seed in (7, 7, 8)
    )
    assert first == again != other
    assert first[0] != first[1]


def test_best_of_keeps_the_likeliest(server):
    options = {"temperature": 1.5, "seed": 3, "max_tokens": 8}
    every = complete(server, "the quick", n=6, logprobs=0, **options).choices
    ranked = sorted(every, key=lambda choice: -np.mean(choice.logprobs.token_logprobs))
    best = complete(server, "the quick", n=2, best_of=6, **options)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 48


def test_log_probabilities(server, model):
    (choice,) = complete(server, "the quick", max_tokens=6, logprobs=3).choices
    rows, said = model.rows_of(choice), choice.logprobs
    np.testing.assert_allclose(said.token_logprobs, rows.max(-1), atol=TOLERANCE)
    for row, top in zip(rows, said.top_logprobs, strict=True):
        np.testing.assert_allclose(list(top.values()), np.sort(row)[-3:][::-1], atol=TOLERANCE)
    assert "".join(said.tokens) == choice.text
    assert said.text_offset == [len("".join(said.tokens[:at])) for at in range(6)]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_has_the_prompts_log_probabilities(server, model, max_tokens, stream):
    """In a prompt that the cache knows, that takes several steps, and beside others."""
    prompt = "And God said, Let there be light. " * 12
    complete(server, prompt)
    answer = complete(server, prompt, max_tokens=max_tokens, echo=True, logprobs=2, n=2, stream=stream)
    events = list(answer) if stream else [answer]
    for index in range(2):
        choices = [choice for event in events for choice in event.choices if choice.index == index]
        tokens = [*choices[0].prompt_token_ids, *(token for choice in choices for token in choice.token_ids)]
        assert len(tokens) == len(choices[0].prompt_token_ids) + max_tokens
        said = [value for choice in choices for value in choice.logprobs.token_logprobs]
        rows = model.log_probabilities(tokens)
        np.testing.assert_allclose(said[1:], rows[np.arange(len(tokens) - 1), tokens[1:]], atol=TOLERANCE)
        assert said[0] is None
        whole = "".join(choice.text for choice in choices)
        assert whole.startswith(prompt)
        offsets = [value for choice in choices for value in choice.logprobs.text_offset]
        texts = [value for choice in choices for value in choice.logprobs.tokens]
        assert all(whole[at:].startswith(each) for at, each in list(zip(offsets, texts, strict=True))[1:])
    if not stream:
        assert answer.usage.completion_tokens == 2 * max_tokens


def test_usage_counts_tokens_and_those_that_were_cached(server):
    prompt = "once upon a time, in the land of Egypt, " * 6
    fresh, cached = (complete(server, [prompt, "x"], max_tokens=5) for _ in range(2))
    tokens = len(server.engine.encode(prompt)), len(server.engine.encode("x"))
    for answer in (fresh, cached):
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (sum(tokens), 10)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert cached.usage.prompt_tokens_details.cached_tokens == (tokens[0] - 1) // PAGE_SIZE * PAGE_SIZE
    assert cached.choices[0].text == fresh.choices[0].text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"structured_outputs": {"regex": "(yes|no), [a-z]{3}"}}, lambda text: text[:3] in ("yes", "no,")),
        ({"structured_outputs": {"choice": ["a+b", "c"]}}, lambda text: text in ("a+b", "c")),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, lambda text: text.strip("()") == "x"),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"guided_regex": "[0-9]{4}"}, str.isdecimal),
        ({"guided_choice": ["ab"]}, "ab".__eq__),
        ({"guided_json": json.dumps(SCHEMA)}, lambda text: isinstance(json.loads(text)["a"], int)),
        ({"guided_grammar": 'start: "b"'}, "b".__eq__),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_texts_of_a_structure(server, asked, fits):
    for seed in range(5):
        choice = complete(
            server, "x", max_tokens=60, temperature=1.5, seed=seed, extra_body=asked | {"min_p": 0.02}
        ).choices[0]
        assert choice.finish_reason == "length" or fits(choice.text), choice.text


def test_tokens_of_a_text_and_back(server):
    for prompt in ("In the beginning", "é 😀"):
        said = server.post("/tokenize", {"model": "demo", "prompt": prompt, "return_token_strs": True})[1]
        assert said["tokens"] == list(server.engine.encode(prompt))
        assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
        bare = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False})[1]["tokens"]
        assert said["tokens"][1:] == bare
        assert server.post("/detokenize", {"tokens": bare})[1] == {"prompt": prompt}


def test_the_model_is_listed(server):
    (card,) = server.client.models.list().data
    assert (card.id, card.max_model_len) == ("demo", 512)
    assert server.client.models.retrieve("demo") == card
