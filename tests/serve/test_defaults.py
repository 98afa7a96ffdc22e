"""The model's generation_config.json says what a request leaves out, on every route; what it gives comes first."""

import json

import pytest

from paged_kv.engine.demo_model import FOLDER
from support.served import served

CHOSEN = {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.3}
MESSAGES = {"messages": [{"role": "user", "content": "In the beginning"}]}
ROUTES = {
    "/v1/completions": ({"prompt": "In the beginning", "max_tokens": 24}, ("choices", 0, "text")),
    "/v1/chat/completions": (MESSAGES | {"max_tokens": 24}, ("choices", 0, "message", "content")),
    "/v1/responses": ({"input": "In the beginning", "max_output_tokens": 24}, ("output", 0, "content", 0, "text")),
    "/v1/messages": (MESSAGES | {"max_tokens": 24}, ("content", 0, "text")),
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chosen")
    for file in FOLDER.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(CHOSEN))
    with served(folder=folder, max_step_tokens=128) as started:
        yield started


def ask(server, path, **options):
    body, place = ROUTES[path]
    status, found = server.post(path, body | {"seed": 3} | options)
    assert status == 200, found
    for each in place:
        found = found[each]
    return found


@pytest.mark.parametrize("path", ROUTES)
def test_the_model_says_what_a_request_leaves_out(server, chosen, path):
    plain, own = ask(server, path), ask(chosen, path)
    assert own != plain
    assert own == ask(server, path, **CHOSEN)
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1}
    assert ask(chosen, path, **neutral) == plain
    for name, value in neutral.items():  # each alone comes before the model's, and the others stay the model's
        assert ask(chosen, path, **{name: value}) == ask(server, path, **CHOSEN | {name: value})


@pytest.mark.parametrize("path", ROUTES)
def test_a_greedy_request_stays_greedy(server, chosen, path):
    greedy = ask(server, path, temperature=0)
    assert ask(chosen, path, temperature=0, repetition_penalty=1) == greedy
    assert ask(chosen, path, temperature=0) == ask(server, path, temperature=0, repetition_penalty=1.3)
