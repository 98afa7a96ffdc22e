"""`paged-kv serve` as a user starts it: what it says, what it refuses, and how it ends."""

import json
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
from click.testing import CliRunner

from paged_kv.commands.serve import serve_command
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.serve import launch, loading
from paged_kv.serve.settings import API_KEY
from support.guarded_server import STOP_SECONDS, guarded


def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=120)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_what_was_chosen_and_ends_when_its_requests_have(tmp_path, end):
    """Five lines and a request that works; a signal ends it once what runs has ended, and nothing is left."""
    with guarded(tmp_path, "--metrics", "--profile", "--pages", "256", key="") as server:
        words = shlex.split(server.process.stdout.readline())
        assert words[:2] == ["curl", f"http://127.0.0.1:{server.port}/v1/chat/completions"]
        asked = urllib.request.Request(words[1], words[-1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answered:
            assert json.loads(answered.read())["usage"]["completion_tokens"] == 32
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answered:
            assert b'vllm:generation_tokens_total{model_name="demo"} 32.0' in answered.read()
        start = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/start_profile", b"{}", {"Content-Type": "application/json"}
        )
        assert urllib.request.urlopen(start, timeout=60).status == 200
        process = psutil.Process(server.process.pid)
        assert {each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"} == {"127.0.0.1"}
        lines = server.log.read_text().splitlines()
        assert [line.split(":")[0] for line in lines] == ["model", "cache", "steps", "with"]
        assert "256 pages of 16 tokens in float32" in lines[1]
        stream = client(server).completions.create(
            model="demo", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        count = len(next(iter(stream)).choices)
        server.process.send_signal(end)
        count += sum(len(event.choices) for event in stream)
        assert count > 200  # characters may take several tokens
        status = server.process.wait(STOP_SECONDS)
        assert status in (-end, 128 + end)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_second_server_is_told_that_the_port_is_taken(tmp_path):
    with guarded(tmp_path, key="") as server:
        command = [*psutil.Process(server.process.pid).cmdline()[:2], "serve", "--demo", "--port", str(server.port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2
        assert ended.stderr == f"error: --host 127.0.0.1 --port {server.port}: Address already in use\n"


@pytest.fixture
def serve(monkeypatch):
    """Runs the command without a model or a socket; gives the settings and the cache's size that it came to."""
    monkeypatch.delenv(API_KEY, raising=False)
    reached, describe = {}, launch.described

    def load(*arguments):
        reached["size"] = arguments[2]
        raise Reached

    def described(setup, model):
        run.lines = describe(setup, model)
        reached["settings"] = setup.settings
        return []

    class Reached(Exception):
        pass

    monkeypatch.setattr(loading, "_load", load)
    monkeypatch.setattr(launch, "described", described)
    monkeypatch.setattr(loading, "free_memory", lambda: 8 << 30)
    monkeypatch.setattr(launch, "listening_sockets", lambda *_: [])

    def run(*arguments):
        result = CliRunner().invoke(serve_command, arguments)
        if result.exception is not None and not isinstance(result.exception, Reached | SystemExit):
            raise result.exception
        assert isinstance(result.exception, Reached), result.output
        return reached["settings"], reached["size"]

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one MODEL, or --demo"),
        (["DIR", "--demo"], "name one MODEL, or --demo"),
        (["--demo", "--page-size", "0"], "--page-size: expected at least 1"),
        (["--demo", "--pages", "-1"], "--pages: expected at least 1"),
        (["--demo", "--pages", "9", "--memory-gb", "1"], "--pages, --memory-gb: expected one of them"),
        (["--demo", "--memory-gb", "1e-6"], "the cache: no page fits"),
        (["--demo", "--memory-gb", "nan"], "--memory-gb: expected a number above 0"),
        (["--demo", "--max-length", "5000"], "--max-length: expected at most 4096, the model's positions, got 5000"),
        (["--demo", "--max-length", "100", "--pages", "2"], "--max-length: expected at most 32, the tokens of 2 pages"),
        (["--demo", "--max-running", "0"], "--max-running: expected at least 1"),
        (["--demo", "--max-queue", "-1"], "--max-queue: expected at least 0"),
        (["--demo", "--max-gap", "0"], "--max-gap: expected a number above 0"),
        (["--demo", "--max-connections", "0"], "--max-connections: expected at least 1"),
        (["--demo", "--max-body-bytes", "0"], "--max-body-bytes: expected at least 1"),
        (["--demo", "--kv-disk-gb", "0"], "--kv-disk-gb: expected a number above 0"),
        (["--demo", "--kv-disk", __file__], "is no folder"),
        (["--demo", "--profile", "--speculate", "lookup"], "--profile: not supported with --speculate"),
        (["--demo", "--profile", "--lora", "a=b"], "--profile: not supported with --lora"),
        (["--demo", "--lora", "a"], "--lora: expected NAME=PATH, got a"),
        (["--demo", "--lora", "a=b", "--lora", "a=c"], "--lora: expected names that differ"),
        (["--demo", "--lora", "demo=b"], "--lora: expected names that differ"),
        (["--demo", "--host", "0.0.0.0"], "lets other machines in"),
        (["--demo", "--api-key", "a b"], "visible ASCII"),
        (["--demo", "--chat-template", "/nothing"], "--chat-template /nothing: cannot be read"),
        (["--demo", "--config", "/nothing"], "--config /nothing: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(serve, arguments, message):
    with pytest.raises(ContractError, match=message.replace("(", "\\(")):
        serve(*arguments)


def test_an_adapter_that_is_missing_is_refused(serve):
    with pytest.raises(CheckpointError, match="/nothing: expected a folder"):
        serve("--demo", "--lora", "a=/nothing")


def test_a_draft_with_other_tokens_is_refused(serve, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(FOLDER / name)
    said = json.loads((FOLDER / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ContractError, match="vocabulary, got another"):
        serve("--demo", "--speculate", str(tmp_path))
    with pytest.raises(CheckpointError):
        serve("--demo", "--speculate", str(tmp_path / "none"))


def test_the_cache_has_half_of_what_is_free_and_no_more_than_all_requests_need(serve):
    assert serve("--demo", "--max-running", "16")[1].tokens == 16 * 4096
    assert serve("--demo", "--max-length", "512")[1].tokens == 64 * 512
    _, size = serve("--demo", "--memory-gb", "0.1")
    assert size.page_bytes * size.num_pages <= 1e8 < size.page_bytes * (size.num_pages + 1)
    assert serve("--demo", "--cache-dtype", "int4", "--memory-gb", "0.1")[1].num_pages > 5 * size.num_pages
    assert serve("--demo", "--pages", "20")[1].max_length == 320


def test_a_file_has_the_options_by_their_names(serve, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        f'model = "{FOLDER}"\nname = "bible"\npages = 64\npage-size = 32\ncache_dtype = "int8"\nmetrics = true\n'
        'allowed-host = ["a.example", "b.example"]\nmax-gap = 0.5\nspeculate = "lookup"\nstrict = true\n'
    )
    settings, size = serve("--config", str(file), "--pages", "32")
    assert (settings.model, settings.name, settings.metrics, settings.strict) == (FOLDER, "bible", True, True)
    assert (settings.allowed_hosts, settings.max_gap) == (("a.example", "b.example"), 0.5)
    assert (settings.speculate, settings.cache_dtype) == ("lookup", "int8")
    assert (size.num_pages, size.page_size) == (32, 32)  # what the command line says comes first
    for text, message in (("wat = 1", "'wat' is no option"), ("pages = ", "cannot be read")):
        file.write_text(text)
        with pytest.raises(ContractError, match=message):
            serve("--config", str(file))
    file.write_text('demo = true\npages = "many"')
    result = CliRunner().invoke(serve_command, ["--config", str(file)])
    assert (result.exit_code, "'many' is not a valid integer" in result.output) == (2, True)


def test_sampling_of_the_model_is_said_and_can_be_left(serve, tmp_path):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    given = tmp_path / "generation_config.json"
    given.unlink(missing_ok=True)
    serve(str(tmp_path))
    assert "the model's" not in serve.lines[-1].replace("by the model's template", "")
    given.write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    serve(str(tmp_path))
    assert serve.lines[-1].endswith("where a request does not say it, the model's temperature 0.6, top_k 20")
    (tmp_path / "serve.toml").write_text('generation-config = "none"')
    for arguments in (["--generation-config", "none"], ["--config", str(tmp_path / "serve.toml")]):
        serve(str(tmp_path), *arguments)
        assert "temperature" not in serve.lines[-1]
    given.write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p: .*, got 7"):
        serve(str(tmp_path))


@pytest.mark.slow
def test_every_capability_of_the_engine_together(tmp_path):
    """Codes in the cache, rotation, speculation, prefixes on disk and a thread: a restarted server finds the prefix."""
    flags = [
        "--cache-dtype",
        "int4",
        "--cache-rotation",
        "hadamard",
        "--speculate",
        "lookup",
        "--kv-disk",
        str(tmp_path / "kv"),
    ]
    flags += ["--threads", "1", "--page-size", "8", "--memory-gb", "0.05"]
    texts = []
    for _ in range(2):
        with guarded(tmp_path, *flags) as server:
            prompt = "And the LORD spake unto Moses, saying, " * 5
            answer = server.complete(prompt, max_tokens=24)
            texts.append(answer["choices"][0]["text"])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert "prefixes in" in server.log.read_text()
    assert texts[0] == texts[1]
    assert cached > 30


@pytest.mark.slow
def test_a_server_that_cannot_say_that_it_is_ready_ends():
    command = [str(Path(sys.executable).with_name("paged-kv")), "serve", "--demo", "--port", "0"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
