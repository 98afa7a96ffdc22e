"""`paged-kv serve --demo`, started as a user starts it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import tokenizers

from paged_kv.engine.demo import write_demo_checkpoint
from support import serving
from support.limits import has_ended, limited

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="the serving environment is not installed")


def get(url, body=None):
    data = None if body is None else body.encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return answer.read().decode()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_when_it_is_ready_and_leaves_nothing_behind(tmp_path, end):
    """The printed request works, metrics are where it says, and all listen on this machine alone."""
    command = [str(Path(sys.executable).with_name("paged-kv")), "serve", "--demo", "--dtype", "float32", "--port", "0"]
    command += ["--metrics", "--", *serving.SAMPLING]
    environment = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": os.defpath}
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    with limited(started, serving.START_SECONDS + serving.STOP_SECONDS) as server:
        try:
            ready, request = server.stdout.readline().split(), server.stdout.readline()
            assert ready[:4] == ["paged-kv:", "ready", "on", ready[3]], log.read_text()[-4000:]
            address, metrics = ready[3], ready[5].rstrip(")")
            words = shlex.split(request)
            assert words[:2] == ["curl", f"{address}/v1/chat/completions"]
            answers = [json.loads(get(words[1], words[-1])) for _ in range(2)]
            assert answers[0]["choices"] == answers[1]["choices"]  # greedy: what a newcomer sees is what the docs show
            assert answers[0]["usage"]["completion_tokens"] == 32
            assert "maxserve_cache_num_total_blocks" in get(metrics)
            processes = [str(server.pid), *children(server.pid)]
            assert len(processes) >= 3  # the server, the metrics, the model
            assert listening(processes) == {"127.0.0.1"}
        finally:
            server.send_signal(end)
            status = server.wait(serving.STOP_SECONDS)
    assert status in (0, 130, 128 + end)
    assert "Traceback" not in log.read_text()
    assert all(has_ended(int(pid)) for pid in processes)


def test_a_user_may_keep_the_compiled_graphs(checkpoint, tmp_path):
    """`--export-mefs` and `--precompiled-mefs`: files of MAX's; the second server says what the first did."""
    prompt = {"prompt": "once a prompt", "max_tokens": 16, "temperature": 0}
    with serving.serving(checkpoint, tmp_path / "log", *serving.COMMON) as server:  # and MAX's cache knows the graph
        texts = [server.client().completions.create(model=server.model, **prompt).choices[0].text]
    for option in ("--export-mefs", "--precompiled-mefs"):
        with serving.serving(
            checkpoint, tmp_path / f"log{option}", *serving.COMMON, option, str(tmp_path / "kept")
        ) as server:
            texts.append(server.client().completions.create(model=server.model, **prompt).choices[0].text)
        (kept,) = (tmp_path / "kept").glob("paged_kv_*.mef")
    assert len(texts[0]) == 16
    assert texts == [texts[0]] * 3
    # Found by its name: where it is missing, MAX says so and compiles nothing.
    kept.rename(kept.with_name("other.mef"))
    with pytest.raises(AssertionError, match=kept.stem.rpartition("-")[0]):  # noqa: SIM117
        with serving.serving(
            checkpoint, tmp_path / "log", *serving.COMMON, "--precompiled-mefs", str(tmp_path / "kept")
        ):
            pass


def listening(processes):
    """The addresses on which these processes listen for TCP."""
    sockets = set()
    for pid in processes:
        for file in Path("/proc", pid, "fd").iterdir():
            sockets.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and inode in sockets:
            number = int(local.split(":")[0], 16)
            found.add(".".join(str(number >> shift & 255) for shift in (0, 8, 16, 24)))
    return found


def test_transformers_reads_the_demos_tokenizer_as_tokenizers_does(tmp_path):
    folder = write_demo_checkpoint(tmp_path / "demo")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("a", "Hé, wörld 😀\n  x", "<s>ab</s> c", " don't , 's"):
        tokens = ours.encode(text).ids
        assert theirs(text)["input_ids"] == tokens
        for skip in (True, False):
            assert theirs.decode(tokens, skip_special_tokens=skip) == ours.decode(tokens, skip_special_tokens=skip)
    config = json.loads((folder / "config.json").read_text())
    for name in ("bos", "eos", "pad"):
        assert getattr(theirs, f"{name}_token_id") == config[f"{name}_token_id"]
    chat = [{"role": "user", "content": "hi"}]
    text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<s>user: hi\nassistant: "
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ours.encode(text[3:]).ids
