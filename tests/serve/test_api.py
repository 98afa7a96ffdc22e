"""What the OpenAI API of the server offers, asked with OpenAI's own client, against a float64 forward pass."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support import serving
from support.numpy_llama import NumpyLlama

serving.require()

TOLERANCE = 1e-3
"""Of float32's log-probabilities."""
RAGGED = ["", "a", "the quick brown fox", "x" * 127, "page " * 27, "lorem ipsum dolor " * 16, "y" * 255, "z, " * 100]
"""Prompts of 1 to 301 tokens: around a page of 128 tokens, and in one to three pieces."""


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def model(checkpoint):
    return NumpyLlama(checkpoint)


def complete(client, prompt, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    return client.completions.create(model="demo", prompt=prompt, extra_body=extra, **options)


def chat(client, text, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="demo", messages=messages, extra_body=extra, **options)


def test_models(client):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("demo", serving.MAX_LENGTH)


@pytest.mark.parametrize("prompt", RAGGED, ids=len)
def test_greedy_text_is_the_oracles(client, model, prompt):
    (choice,) = complete(client, prompt).choices
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == 16
    model.assert_greedy(choice)


def test_requests_of_one_batch_do_not_mix(client, model):
    with ThreadPoolExecutor(len(RAGGED)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, prompt, max_tokens=40), RAGGED))
    for answer in answers:
        model.assert_greedy(answer.choices[0])


def test_chat_is_the_template_and_then_greedy(client, model):
    (choice,) = chat(client, "the quick brown fox").choices
    assert choice.message.role == "assistant"
    model.assert_greedy(choice)


def test_several_prompts_and_token_ids(client):
    first, second = complete(client, ["ab", "cd"]).choices
    assert [first.index, second.index] == [0, 1]
    assert complete(client, first.prompt_token_ids).choices[0].text == first.text
    assert complete(client, "cd").choices[0].text == second.text


def test_stream_is_the_answer_in_pieces(client):
    whole = complete(client, "the quick")
    pieces = list(complete(client, "the quick", stream=True, stream_options={"include_usage": True}))
    *texts, usage = pieces
    assert len(texts) > 1
    assert "".join(piece.choices[0].text for piece in texts) == whole.choices[0].text
    assert texts[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 16)


def test_chat_stream_is_the_answer_in_pieces(client):
    whole = chat(client, "the quick").choices[0]
    pieces = [piece.choices[0] for piece in chat(client, "the quick", stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason


def test_stop_string(client):
    whole = complete(client, "the quick", max_tokens=40).choices[0].text
    stop = whole[11]
    before = whole[: whole.index(stop)]
    choice = complete(client, "the quick", max_tokens=40, stop=[stop, "\0"]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == before + stop  # MAX keeps the string here, and drops it from a chat's message


def test_chat_stop_string(client):
    whole = chat(client, "the quick", max_tokens=40).choices[0].message.content
    stop = whole[11]
    choice = chat(client, "the quick", max_tokens=40, stop=stop).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", whole[: whole.index(stop)])


def test_a_seed_decides_the_sample(client):
    options = {"temperature": 1.0, "max_tokens": 32}
    first, again, other = (complete(client, "the quick", seed=seed, **options).choices[0].text for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}])
def test_a_sample_of_one_token_is_greedy(client, narrow):
    greedy = complete(client, "the quick").choices[0].text
    assert complete(client, "the quick", temperature=1.0, seed=3, **narrow).choices[0].text == greedy


def test_frequency_penalties(client):
    """A negative one repeats a token more and more, a positive one seldom."""
    often, seldom = (complete(client, "the quick", max_tokens=40, frequency_penalty=p).choices[0] for p in (-2, 2))
    assert np.bincount(often.token_ids).max() > 20 > np.bincount(seldom.token_ids).max()


def test_log_probabilities(client, model):
    (choice,) = complete(client, "the quick", max_tokens=6, logprobs=3).choices
    rows = model.rows_of(choice)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, rows.max(-1), atol=TOLERANCE)
    for row, top in zip(rows, choice.logprobs.top_logprobs, strict=True):
        np.testing.assert_allclose(sorted(top.values()), np.sort(row)[-3:], atol=TOLERANCE)


def test_chat_log_probabilities(client, model):
    (choice,) = chat(client, "the quick", max_tokens=6, logprobs=True, top_logprobs=2).choices
    rows = model.rows_of(choice)
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    np.testing.assert_allclose([entry.logprob for entry in content], rows.max(-1), atol=TOLERANCE)
    for row, entry in zip(rows, content, strict=True):
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(row)[-2:][::-1], atol=TOLERANCE)


def test_usage_counts_tokens(client):
    usage = complete(client, "abc", max_tokens=5).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 5, 9)  # <s>, a, b, c


def test_a_prompt_that_was_seen_is_found_in_the_prefix_cache(client, model):
    prompt = "once upon a time, " * 17  # 307 tokens: two whole pages
    fresh, cached = (complete(client, prompt) for _ in range(2))
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert cached.usage.prompt_tokens_details.cached_tokens == 256
    assert cached.choices[0].text == fresh.choices[0].text
    model.assert_greedy(cached.choices[0])


# What docs/serving.md says that MAX has not on the CPU. One that fails says that MAX has it now.


@pytest.mark.parametrize(
    "missing", [{"n": 2}, {"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"logit_bias": {"65": 100}}]
)
def test_what_max_takes_and_ignores(client, missing):
    plain = complete(client, "the quick")
    (choice,) = complete(client, "the quick", **missing).choices
    assert choice.text == plain.choices[0].text


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}},
        {"type": "json_schema", "json_schema": {"name": "regex", "schema": {"type": "string", "pattern": "^[0-9]+$"}}},
    ],
)
def test_structured_output_is_refused(server, wanted):
    """By `max serve`; `paged-kv serve` has it (test_forms.py)."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "response_format": wanted}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 400
    assert "--enable-structured-output" in answer["error"]["message"]
