"""Recorded requests of coding agents (tests/support/agents) are answered, and the real clients read the answers."""

import json
from itertools import pairwise
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from starlette.testclient import TestClient

import support
from support.agent_turns import APIS, EVERY, KEEPS_THOUGHTS, SYSTEM_FIRST, turns
from support.scripted_server import PAGE_SIZE, ScriptedServer, call
from support.tool_chats import THINKING

FOLDER = Path(support.__path__[0]) / "agents"
FILE = "<think>A file.</think>I write it. "
PATCH = "*** Begin Patch\n*** Add File: alpha\n+one\n*** End Patch\n"
SCRIPTS = {
    # what the model says to each request, and the names of what is ignored
    "codex": (
        [
            "<think>A file.</think>" + call("exec_command", cmd="echo one > alpha"),
            "Done.",
            call("multi_agent_v1.close_agent", target="nobody"),
            "No such agent.",
            "Let me look. " + call("view_image", path="/home/user/project/dot.png"),
            "I cannot see it.",
        ],
        "input[15].output[0], tools[8]",
    ),
    "codex_patch": ([call("apply_patch", input=PATCH), "Done.", "Bye."], "tools[8], tools[9]"),
    "claude_code": (
        [
            FILE + call("Write", file_path="/home/user/project/alpha", content="one\n"),
            "Done.",
            call("Read", file_path="dot.png") + "\n" + call("Bash", command="false", description="Fail"),
            "I cannot see it.",
            call("WebSearch", query="paged attention"),
            "Nothing is known.",
        ],
        "messages[7].content[0].content[0], output_config.effort",
    ),
    "claude_code_search": (["Nothing."], "tools[0], output_config.effort"),
    "opencode": (
        [
            FILE + call("write", content="one\n", filePath="/home/user/project/alpha"),
            "Done.",
            call("read", filePath="dot.png") + "\n" + call("bash", command="false"),
            "I cannot see it.",
        ],
        "",
    ),
    "opencode_title": (["A title"], ""),
    "aider": (["alpha\n```\none\n```", "It is there."], ""),
}


def blocks_of_response(http, body):
    """The blocks of an answer of /v1/responses: its thoughts, texts and calls."""
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
    stream = client.post(
        "/responses", body=body, cast_to=object, stream=True, stream_cls=openai.Stream[ResponseStreamEvent]
    )
    *_, last = stream
    assert last.type == "response.completed"
    blocks = []
    for item in last.response.output:
        if item.type == "function_call":
            name = f"{item.namespace}.{item.name}" if item.namespace else item.name
            blocks.append(("call", name, json.loads(item.arguments)))
        elif item.type == "custom_tool_call":
            blocks.append(("call", item.name, {"input": item.input}))
        else:
            blocks.append(("thought" if item.type == "reasoning" else "text", item.content[0].text))
    return blocks


def blocks_of_message(http, body):
    """Those of an answer of /v1/messages."""
    client = anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=http, max_retries=0)
    stream = client.post(
        "/v1/messages?beta=true",
        body=body,
        cast_to=object,
        stream=True,
        stream_cls=anthropic.Stream[RawMessageStreamEvent],
    )
    blocks, texts = [], []
    for event in stream:
        if event.type == "content_block_start":
            blocks.append(event.content_block)
            texts.append("")
        elif event.type == "content_block_delta" and event.delta.type != "signature_delta":
            texts[-1] += next(iter(event.delta.model_dump(exclude={"type"}, exclude_none=True).values()))
    kinds = {"thinking": "thought"}
    return [
        ("call", block.name, json.loads(text)) if block.type == "tool_use" else (kinds.get(block.type, "text"), text)
        for block, text in zip(blocks, texts, strict=True)
    ]


def blocks_of_chat(http, body):
    """Those of an answer of /v1/chat/completions."""
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
    stream = client.post(
        "/chat/completions", body=body, cast_to=object, stream=True, stream_cls=openai.Stream[ChatCompletionChunk]
    )
    texts, calls = {"thought": "", "text": ""}, []
    for chunk in stream:
        for choice in chunk.choices:
            texts["text"] += choice.delta.content or ""
            texts["thought"] += getattr(choice.delta, "reasoning_content", None) or ""
            for each in choice.delta.tool_calls or []:
                if each.function.name:
                    calls.append([each.function.name, ""])
                calls[each.index][1] += each.function.arguments or ""
    blocks = [(kind, text) for kind, text in texts.items() if text]
    return blocks + [("call", name, json.loads(arguments)) for name, arguments in calls]


READERS = {
    "/v1/responses": blocks_of_response,
    "/v1/messages": blocks_of_message,
    "/v1/chat/completions": blocks_of_chat,
}


def blocks_of_text(text):
    """The blocks of the answer that clients must read, by the model's text."""
    blocks = []
    if text.startswith("<think>"):
        thought, text = text.removeprefix("<think>").split("</think>")
        blocks.append(("thought", thought))
    text, *calls = text.split("<tool_call>\n")
    if text.strip():
        blocks.append(("text", text.strip()))
    for each in calls:
        written = json.loads(each.split("\n</tool_call>")[0])
        blocks.append(("call", written["name"], written["arguments"]))
    return blocks


def requests(name):
    """The path and the bodies of a recorded conversation. Claude Code has a new checksum in each, as it is reported."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    bodies = [recorded["body"] | own for own in recorded["requests"]]
    for number, body in enumerate(bodies):
        for block in body.get("system", ()):
            if block["text"].startswith("x-anthropic-billing-header"):
                bodies[number] = json.loads(json.dumps(body).replace("cc_entrypoint=sdk-cli;", f"cch=0000{number};"))
    return recorded["path"], bodies


def test_all_are_replayed():
    assert {file.stem for file in FOLDER.iterdir()} == SCRIPTS.keys()


@pytest.mark.parametrize("template", [THINKING, SYSTEM_FIRST], ids=["any place", "system first"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_requests_of_agents(name, template):
    script, ignored = SCRIPTS[name]
    path, bodies = requests(name)
    server = ScriptedServer(script, template=template)
    with TestClient(server.app, base_url="http://localhost") as http:
        for body, text in zip(bodies, script, strict=True):
            blocks = [
                (kind, *(each.strip() if kind == "text" else each for each in block))
                for kind, *block in READERS[path](http, body)
            ]
            assert blocks == blocks_of_text(text)
    assert {each.status for each in server.exchanges} == {200}
    assert server.exchanges[-1].ignored == ignored
    for earlier, later in pairwise(server.jobs):
        most = len(earlier.tokens) - 1  # the last one may have the beginning of the answer in it
        if name == "aider":  # what it says of its files changes, behind its instructions
            most = len(server.served.tokenizer.encode(server.prompt(earlier).split("user: ")[0], is_template=True))
        assert later.tokens[:most] == earlier.tokens[:most]


LONG = {
    # template, whether the model thinks: what of the turn before is in the cache
    "no thoughts": (THINKING, False, "answer"),
    "one system message": (SYSTEM_FIRST, False, "answer"),
    "thoughts are left out": (THINKING, True, "prompt"),
    "thoughts are kept until the next question": (KEEPS_THOUGHTS, True, "question"),
}
CASES = [(api, case) for api in APIS for case in LONG if api == "messages" or case == "one system message"]


@pytest.mark.slow
@pytest.mark.parametrize(("api", "case"), CASES)
def test_a_turn_computes_its_own_tokens(api, case):
    template, thinks, shared = LONG[case]
    done = list(turns(api, template, 40, thinks=thinks))
    for number, (earlier, turn) in enumerate(pairwise(done), 1):
        assert turn.cached + turn.computed == turn.prompt
        least = earlier.prompt + earlier.answer * (shared == "answer")
        if shared == "question":
            least = done[number - EVERY].prompt if number % EVERY == 0 else earlier.prompt + earlier.answer
        assert least - PAGE_SIZE <= turn.cached, number
