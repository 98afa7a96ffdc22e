"""Codex itself against the server; `.ci/run` installs it where npm can, in `.npm-codex`, and runs this."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.scripted_server import ScriptedServer, call

INSTALLED = Path(__file__).parents[2] / ".npm-codex/node_modules/.bin/codex"
SECONDS = 120
"""Limit of a turn, which takes 3."""
CONFIG = """
model_provider = "loopback"
model_context_window = 131072
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.loopback]
name = "loopback"
base_url = "http://127.0.0.1:{port}/v1"
wire_api = "responses"
env_key = "PAGED_KV_API_KEY"
"""


def poke(prompt):
    """A call that writes to the program that the last call started."""
    session = int(re.findall(r"session ID (\d+)", prompt)[-1])
    return call("write_stdin", chars="seven\n", session_id=session, yield_time_ms=3000)


def run(command, **options):
    return call("exec_command", cmd=command, **options)


TURNS = {
    "Write alpha": ([run("echo one > alpha")], "Done."),
    "Read alpha": (["<think>It is a file.</think>" + run("cat alpha")], "It says one."),
    "Add a line": ([run("echo two >> alpha"), run("cat alpha")], "Two lines."),
    "Do two things": ([run("echo three > beta") + "\n" + run("wc -l alpha")], "Both done."),
    "Fail": ([run("cat gamma; exit 3")], "There is no gamma."),
    "Ask a program": ([run("read word; echo heard $word", tty=True, yield_time_ms=250), poke], "It heard."),
    "Stop an agent": ([call("multi_agent_v1.close_agent", target="nobody")], "There is no such agent."),
    "Look at a picture": ([call("view_image", path="{folder}/picture.png")], "I cannot see it."),
    "Write other letters": ([run("printf 'ü 学 \\\\ \"' > letters; cat letters")], 'ü 学 \\ "'),
    "Only talk": ([], "Goodbye."),
}
"""Calls of the model and its last words, by what the user asks."""
OUTPUTS = ["one", "one\ntwo", "2 alpha", "exited with code 3", "heard seven", "nobody", "image omitted", 'ü 学 \\ "']
"""The model is told of these in this order."""
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc000000301010"
    "0c9fe92ef0000000049454e44ae426082"
)


@pytest.fixture
def ask(tmp_path):
    """Ask Codex in a folder of its own, and return its events."""
    program = INSTALLED if INSTALLED.exists() else shutil.which("codex")
    if program is None:
        pytest.skip("Codex is not here: npm install --prefix .npm-codex @openai/codex")
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CODEX_HOME": str(tmp_path / "home")}

    def ask(port, text, *resume, model="demo"):
        (tmp_path / "home/config.toml").write_text(CONFIG.format(port=port))
        done = subprocess.run(
            [program, "exec", "--json", "--skip-git-repo-check", "--model", model, *resume, text],
            cwd=tmp_path / "work",
            env=environment | {"PAGED_KV_API_KEY": "none"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    ask.folder = tmp_path / "work"
    return ask


def items(events, kind):
    return [each["item"] for each in events if each["type"] == "item.completed" and each["item"]["type"] == kind]


def test_ten_turns_with_tools(ask):
    (ask.folder / "picture.png").write_bytes(PICTURE)
    script = [text for calls, said in TURNS.values() for text in (*calls, said)]
    script = [text.replace("{folder}", str(ask.folder)) if isinstance(text, str) else text for text in script]
    server = ScriptedServer(script)
    with server.listening() as port:
        for number, (text, (_, said)) in enumerate(TURNS.items()):
            events = ask(port, text, *(("resume", "--last") if number else ()))
            assert [each["text"] for each in items(events, "agent_message")] == [said], text
    assert {each.status for each in server.exchanges} == {200}
    assert len(server.exchanges) == len(script)
    assert {each.ignored.split(", ")[-1] for each in server.exchanges} == {"tools[8]"}  # its web search
    assert (ask.folder / "alpha").read_text() == "one\ntwo\n"
    assert (ask.folder / "beta").read_text() == "three\n"
    assert (ask.folder / "letters").read_text() == 'ü 学 \\ "'
    prompt = server.prompt(server.jobs[-1])
    told = prompt[prompt.index("Write alpha") :]
    for output in OUTPUTS:
        assert output in told
        told = told[told.index(output) + len(output) :]
    assert "unsupported call" not in prompt
    shared = sum(len(job.tokens) - server.engine.model.page_size for job in server.jobs[:-1])
    assert server.engine.tokens_found >= shared


PATCH = '*** Begin Patch\n*** Add File: alpha\n+one\n+"ü" \\\n*** End Patch\n'


def test_a_custom_tool(ask):
    """Codex offers its patches, a text by a grammar, to models of names that it knows."""
    server = ScriptedServer([call("apply_patch", input=PATCH), "Done."], "gpt-5.5")
    with server.listening() as port:
        events = ask(port, "Write alpha", model="gpt-5.5")
    assert [each["text"] for each in items(events, "agent_message")] == ["Done."]
    assert [each["status"] for each in items(events, "file_change")] == ["completed"]
    assert (ask.folder / "alpha").read_text() == 'one\n"ü" \\\n'
    assert {each.status for each in server.exchanges} == {200}
