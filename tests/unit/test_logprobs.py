"""Log-probabilities in answers: the bytes of tokens, their places in the text, and no token that the text has not."""

from itertools import pairwise

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.sampling import Logprobs
from paged_kv.engine.stop_text import StopText
from paged_kv.serve.backend import Piece
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.openai_completions import read_completion
from paged_kv.serve.served_model import ServedModel

TEXT = "aé–😀 b"
MODEL = ServedModel(open_source(FOLDER), "demo", 512)
(END,) = MODEL.config.eos_token_ids
TOKENS = MODEL.tokenizer.encode(TEXT, is_template=True)
PARTS = [MODEL.token_bytes(token) for token in TOKENS]


def pieces(exchange, tokens, finish="stop"):
    """The pieces of one sample, as an engine gives them."""
    sampling = exchange.jobs[0].sampling
    decoder = StopText(MODEL.tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens), sampling.stop)
    top = {token: -1.0 - at for at, token in enumerate(dict.fromkeys([*TOKENS, END]))}
    prompt = tuple(Logprobs(-2.0, top) for _ in exchange.jobs[0].tokens[1:])
    for at, token in enumerate(tokens):
        text, stops = ("", False) if token == END else decoder.push(token)
        is_last = at + 1 == len(tokens)
        if is_last and not stops:
            text += decoder.flush()[0]
        yield Piece(0, (token,), text, finish if is_last else None, None, (Logprobs(-0.5, top),), 0, prompt)
        prompt = ()


def completed(tokens, **fields):
    """The whole answer's choice, and those of the events of the same answer in a stream."""
    body = {"prompt": "é x", "logprobs": 20, "max_tokens": 20} | fields
    whole, stream = (read_completion(BodyFields(body | {"stream": each}), MODEL) for each in (False, True))
    events = [event for piece in pieces(stream, tokens) for event in stream.add(0, [piece])]
    for piece in pieces(whole, tokens):
        whole.add(0, [piece])
    return whole.whole()["choices"][0], [event["choices"][0] for event in events]


def test_tokens_of_a_chat_have_their_own_bytes_and_no_end_among_them():
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    exchange = read_chat(BodyFields(body), MODEL)
    for piece in pieces(exchange, [*TOKENS, END]):
        exchange.add(0, [piece])
    (choice,) = exchange.whole()["choices"]
    content = choice["logprobs"]["content"]
    assert any(len(part) > 1 for part in PARTS) or len(PARTS) > len(TEXT), "no token is a part of a character"
    assert [bytes(each["bytes"]) for each in content] == PARTS
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == choice["message"]["content"] == TEXT
    shown = [each["token"] for each in content]
    assert shown[0] == "a"
    assert "\ufffd" not in "".join(shown)
    assert len(set(shown)) == len(set(PARTS))
    for each in content:  # an end token may be likely without having come
        assert [bytes(top["bytes"]) for top in each["top_logprobs"]] == list(dict.fromkeys([*PARTS, b"</s>"]))


@pytest.mark.parametrize("end", [[], [END]])
@pytest.mark.parametrize("echo", [False, True])
def test_places_in_a_text_are_those_of_its_characters(end, echo):
    whole, chunks = completed([*TOKENS, *end], echo=echo)
    said = whole["logprobs"]
    start = whole["text"].index(TEXT)
    assert start == (3 if echo else 0)
    offsets = said["text_offset"][-len(TOKENS) :]
    # A token begins where the text of the bytes before it ends, an unfinished character not counted.
    assert offsets == [start + len(b"".join(PARTS[:at]).decode(errors="ignore")) for at in range(len(TOKENS))]
    assert all(a <= b for a, b in pairwise(said["text_offset"]))
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name in said:
        assert [each for chunk in chunks for each in chunk["logprobs"][name]] == said[name]
    for token, part, top in zip(
        said["tokens"][-len(TOKENS) :], PARTS, said["top_logprobs"][-len(TOKENS) :], strict=True
    ):
        text = "".join(chr(byte) if byte < 127 else f"\\x{byte:02x}" for byte in part)
        assert token in (part.decode(errors="ignore"), f"bytes:{text}")
        assert top[token] in (-0.5, *(-1.0 - at for at in range(20)))
        assert len(top) == len(set(TOKENS)) + 1


def test_a_stop_text_moves_no_place_behind_the_text():
    whole, _ = completed(TOKENS, stop="–😀 ")
    assert whole["text"] == "aé"
    assert max(whole["logprobs"]["text_offset"]) == 2


def test_tokens_of_one_text_have_a_key_each(monkeypatch):
    same = {7: b"x", 8: b"x", 9: b"y", 10: b"x"}
    monkeypatch.setattr(MODEL, "token_bytes", same.__getitem__)
    exchange = read_completion(BodyFields({"prompt": "x", "logprobs": 3}), MODEL)
    assert exchange._top(8, Logprobs(-2.0, {7: -1.0, 8: -2.0, 9: -3.0})) == {"token_id:7": -1.0, "x": -2.0, "y": -3.0}
    assert exchange._top(9, Logprobs(-3.0, {7: -1.0, 8: -2.0})) == {"x": -1.0, "token_id:8": -2.0, "y": -3.0}
