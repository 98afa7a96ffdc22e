"""`paged-kv chat`: on a terminal, through pipes, with tools and thoughts, and when its context is full."""

import io
import json
import re
import sys

import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.cli import _run
from paged_kv.commands.chat_session import ChatSession
from paged_kv.commands.chat_terminal import ChatTerminal
from paged_kv.engine.demo_model import FOLDER
from paged_kv.graphs.models.adapters import adaptable_layers
from paged_kv.serve.served_model import ServedModel
from support.adapters import noise, write_peft
from support.checkpoints import rewrite
from support.served import served
from support.terminal import dialogue
from support.tool_chats import CALL, THINKING, TOOLS, scripted_without_compiler

FIRST = "In the beginning God created the heaven and the earth and the sea"
STATISTICS = r"prompt: (\d+) tokens, (\d+) cached, .* s; answer: (\d+) tokens.*; context: (\d+) of (\d+)"


@pytest.fixture
def piped(monkeypatch, capsys):
    """Runs the command with lines on stdin; its exit status, stdout and stderr."""

    def piped(*lines, options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = _run(["chat", *map(str, options or ["--demo", "--temperature", 0, "--max-new-tokens", 24])])
        return status, *capsys.readouterr()

    return piped


@pytest.mark.slow
def test_a_conversation_on_a_terminal(tmp_path):
    """An answer is interrupted, the next one shares its pages, and the last one is alone."""
    with dialogue(["chat", "--demo", "--seed", 3, "--ignore-end"]) as terminal:
        terminal.until(">> ")
        terminal.send(f"{FIRST}\n")
        terminal.until(f"{FIRST}\r\n")
        terminal.until(" ")  # an answer of the whole context takes seconds
        terminal.send("\x03")
        assert "it was interrupted" in terminal.until(">> ")
        terminal.send("and \\\n")
        terminal.until(".. ")
        terminal.send("then\n")
        terminal.until("\n")
        terminal.until(" ")
        terminal.send("\x03")
        terminal.until(">> ")
        terminal.send("/stats\n")
        prompt, cached, *_ = map(int, re.search(STATISTICS, terminal.until(" free")).groups())
        assert 16 <= cached < prompt  # the user's first text is a page at least
        terminal.send(f"/save {tmp_path / 'saved'}\n")
        terminal.until("4 messages in")
        terminal.until(">> ")
        terminal.send("/clear\n/stats\n")
        terminal.until("no answer yet")
        terminal.until(">> ")
        terminal.until("leaves", again="\x03")
        terminal.until(">> ")
        terminal.send("\x04")
        assert terminal.child.wait(60) == 0
    saved = json.loads((tmp_path / "saved").read_text())["messages"]
    assert [each["role"] for each in saved] == ["user", "assistant"] * 2
    assert saved[2]["content"] == "and \nthen"


def test_the_answers_are_those_of_the_server(piped, tmp_path):
    status, out, err = piped("once upon", "/system Be brief.", '"""a time', 'of old"""', f"/save {tmp_path / 'saved'}")
    assert (status, err.count("error")) == (0, 0)
    body = json.loads((tmp_path / "saved").read_text())
    system, *messages = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert messages[2]["content"] == "a time\nof old"
    assert out == "".join(f"{each['content']}\n" for each in (messages[1], messages[3]))
    with served() as server:
        for asked, answer in ((messages[:1], messages[1]), ([system, *messages[:3]], messages[3])):
            body |= {"messages": asked, "temperature": 0, "max_tokens": 24}
            assert server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == answer["content"]


def test_an_adapter_answers_until_the_model_is_named(piped, tmp_path):
    layers = noise(adaptable_layers(load_config(FOLDER)), 4, 0)
    folder, files = write_peft(tmp_path / "adapter", layers, 4, 8.0), [tmp_path / "tuned", tmp_path / "demo"]
    lines = ("once upon", f"/save {files[0]}", "/clear", "/model demo", "once upon", f"/save {files[1]}", "/model none")
    options = ["--demo", "--temperature", 0, "--max-new-tokens", 24, "--lora", f"tuned={folder}"]
    status, _, err = piped(*lines, options=options)
    assert (status, err.count("error")) == (1, 1)
    assert "demo answers; there are demo, tuned" in err
    assert "error: model: expected 'demo' or 'tuned', got 'none'" in err
    answers = []
    with served() as server:
        server.post("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": str(folder)})
        for file in files:
            body = json.loads(file.read_text())
            assert body["model"] == file.name
            asked, answer = body["messages"]
            body |= {"messages": [asked], "temperature": 0, "max_tokens": 24}
            assert server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == answer["content"]
            answers.append(answer["content"])
    assert answers[0] != answers[1]


def test_a_full_context_leaves_out_the_oldest_turns(piped):
    options = ["--demo", "--max-length", 128, "--max-new-tokens", 12, "--temperature", 0, "--ignore-end", "--verbose"]
    status, out, err = piped(*(f"The king of the land of number {number}" for number in range(14)), options=options)
    assert (status, out.count("\n") >= 14) == (0, True)
    left_out = [int(number) for number in re.findall(r"does not see the first (\d+) turns", err)]
    assert len(left_out) >= 2
    assert left_out == sorted(set(left_out))
    counts = [tuple(map(int, each)) for each in re.findall(STATISTICS, err)]
    assert len(counts) == 14
    assert max(total for *_, total, _ in counts) <= 128
    assert sum(cached > 0 for _, cached, *_ in counts) >= 14 - 1 - len(left_out)  # others share the turn before
    long = piped("word " * 300, "hello", options=options)
    assert (long[0], long[1].count("\n")) == (1, 1)
    assert "error: This model's maximum context length is 128 tokens. However, your conversation resulted in" in long[2]


@pytest.fixture
def talk(monkeypatch, capsys):
    """Talks to a script on a terminal; the session, what was shown, and what was said beside it."""

    def talk(script, *typed):
        lines = iter(typed)

        def read(_):
            line = next(lines, None)
            if line is None or isinstance(line, BaseException):
                raise line or EOFError
            return line

        model = ServedModel(open_source(FOLDER), "demo", 2048, THINKING)
        session = ChatSession(lambda: scripted_without_compiler(*script), model, {}, tools=TOOLS)
        monkeypatch.setattr("builtins.input", read)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        assert ChatTerminal(session, verbose=False).run() == 0
        return session, *capsys.readouterr()

    return talk


def test_thoughts_are_dim_and_calls_wait_for_results(talk):
    script = f"<think>Which\x1b[2Jdays?</think>Let me see. {CALL}", "It is warm."
    session, out, _ = talk(script, "How is it in Ur?", "30 degrees", "/exit")
    shown = out.replace("\x1b[0m\x1b[2m", "")  # token by token
    thought, call = "\x1b[2mWhich[2Jdays?\x1b[0m", '\x1b[1mweather(place="Ur", days=2)\x1b[0m'
    assert shown == f"{thought}\nLet me see.\n{call}\nIt is warm.\n"
    assert [each["role"] for each in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.messages[1]["reasoning_content"] == "Which\x1b[2Jdays?"
    assert session.messages[2]["content"] == "30 degrees"


def test_a_call_without_a_result_is_forgotten(talk):
    session, _, err = talk(("Hello.", CALL, "Bye."), "Hi", "How is it?", KeyboardInterrupt(), "Then bye")
    assert [each["content"] for each in session.messages] == ["Hi", "Hello.", "Then bye", "Bye."]
    assert "leaves" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name one MODEL, or --demo"),
        (["--demo", "--tools", "missing"], "--tools missing: cannot be read"),
        (["--demo", "--tools", "tools"], "tools[0]"),
        (["--demo", "--top-p", 2], "top_p: expected a number above 0 and at most 1, got 2"),
        (["--demo", "--lora", "tuned"], "--lora: expected NAME=PATH, got tuned"),
        (["--demo", "--lora", "tuned=/nothing"], "/nothing: expected a folder with adapter_config.json"),
        (["plain"], "plain: expected a model with a chat template, got one without"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(piped, copy, monkeypatch, options, message):
    plain = copy.rename(copy.with_name("plain"))
    monkeypatch.chdir(copy.parent)
    rewrite(plain / "tokenizer_config.json", chat_template=None)
    (copy.parent / "tools").write_text("[3]")
    monkeypatch.setattr("paged_kv.serve.loading._load", lambda *_: pytest.fail("it loads the model"))
    status, out, err = piped(options=[*options, "--max-length", 64])
    assert (status, out) == (2, "")
    assert message in err
