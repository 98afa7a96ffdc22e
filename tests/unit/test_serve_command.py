"""`paged-kv serve`: what it refuses, what it chooses, and what it tells the user; no server is started."""

import json
import shlex
from dataclasses import replace
from importlib import metadata

import pytest

from paged_kv import cli
from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.serve import launch, memory
from paged_kv.serve.launch import Serving, prepare, ready_lines
from paged_kv.serve.memory import ServerMemory

GIB = 1 << 30


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo_checkpoint(tmp_path_factory.mktemp("serve") / "demo")


@pytest.fixture
def request_(demo, monkeypatch):
    monkeypatch.setattr(launch, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "_memory_of_max", lambda: 10 * GIB)
    return Serving(demo, "127.0.0.1", 0, "bfloat16", 16)


def flags_of(arguments):
    """MAX's flags and their values, the last of each."""
    found = {}
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name.startswith("--"):
            found[name] = value if value and not value.startswith("--") else None
    return found


def test_what_max_is_told(request_, demo):
    arguments = prepare(request_)
    assert flags_of(arguments) == {
        "--model-path": str(demo),
        "--devices": "cpu",
        "--custom-architectures": "paged_kv.serve",
        "--max-batch-size": "16",
        "--kv-cache-page-size": "128",
        "--quantization-encoding": "bfloat16",
        "--max-length": "4096",
        "--device-memory-utilization": "0.4009",
        "--max-batch-input-tokens": "512",
        "--enable-prefix-caching": None,
    }


def test_maxs_own_flags_replace_what_would_be_chosen(request_):
    given = (
        "--max-length=256",
        "--no-enable-prefix-caching",
        "--max-batch-input-tokens",
        "64",
        "--pretty-print-config",
    )
    arguments = prepare(replace(request_, flags=given, max_batch_size=1000))
    assert tuple(arguments[-len(given) :]) == given
    assert not {"--max-length", "--enable-prefix-caching"} & set(arguments)
    assert arguments.count("--max-batch-input-tokens") == 1


@pytest.mark.parametrize("given", [("--quantization-encoding", "float32"), ("--quantization-encoding=float32",)])
def test_memory_is_planned_for_maxs_own_encoding(request_, given):
    wide = prepare(replace(request_, dtype="float32"))
    arguments = prepare(replace(request_, flags=given))
    chosen = "--device-memory-utilization"
    assert flags_of(arguments)[chosen] == flags_of(wide)[chosen] != flags_of(prepare(request_))[chosen]


def test_a_step_has_room_for_every_request_that_decodes(request_):
    arguments = prepare(replace(request_, max_batch_size=1000))
    assert flags_of(arguments)["--max-batch-input-tokens"] == "1000"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 16}, "--page-size must be a multiple of 128"),
        ({"page_size": 0}, "--page-size must be a multiple of 128"),
        ({"page_size": 128 * 10**400}, "too few are left for the cache"),
        ({"max_batch_size": 0}, "--max-batch-size must be at least 1"),
        (
            {"max_batch_size": 10**400},
            "--max-batch-size must be at least 1 and below 2\\^31, not .an integer of 1329 bits",
        ),
        ({"flags": ("--kv-cache-page-size", "16")}, "--kv-cache-page-size cannot be handed on to MAX"),
        ({"flags": ("--host=0.0.0.0",)}, "--host cannot be handed on to MAX"),
        ({"flags": ("--model", "x")}, "--model cannot be handed on to MAX"),
        ({"flags": ("--kv-cache-format", "int8")}, "--kv-cache-format int8: MAX allocates the server's pages"),
        ({"flags": ("--kv-cache-format=int4",)}, "generate --cache-dtype int4"),
    ],
)
def test_bad_arguments_are_refused(request_, change, message):
    with pytest.raises(ContractError, match=message):
        prepare(replace(request_, **change))


def run(capsys, *arguments):
    """The exit status, and what stderr has, which is one line."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return exit_.value.code, captured.err


@pytest.fixture
def server(monkeypatch):
    """The requests that come as far as the server."""
    served = []
    monkeypatch.setattr(launch, "serve", lambda request: (served.append(request), prepare(request)))
    return served


@pytest.mark.usefixtures("server")
def test_a_folder_that_is_not_there(capsys, tmp_path):
    assert run(capsys, tmp_path / "none") == (2, f"error: {tmp_path / 'none'}: no such folder\n")


@pytest.mark.usefixtures("server")
def test_a_model_of_an_unknown_family(capsys, demo, tmp_path):
    config = json.loads((demo / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, line = run(capsys, tmp_path)
    assert status == 2
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize("arguments", [(), ("--demo", "folder"), ("folder", "another"), ("--demo", "--", "7")])
def test_one_folder_or_the_demo(capsys, server, monkeypatch, tmp_path, arguments):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(capsys, *arguments) == (2, "error: name one folder or --demo; MAX's own flags follow after --\n")
    assert server == []


@pytest.mark.usefixtures("request_")
def test_what_follows_two_dashes_is_maxs(server):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--demo", "--port", "0", "--dtype", "float32", "--", "--max-length", "256"])
    assert not exit_.value.code
    (served,) = server
    assert served == Serving(FOLDER, "127.0.0.1", 0, "float32", 16, 128, ("--max-length", "256"))


def test_an_environment_without_the_server_is_refused_before_anything_else(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "requires", lambda _: ["pytest<1; extra == 'serve'", "nosuch>=1; extra == 'serve'"])
    status, line = run(capsys, tmp_path / "none")
    assert status == 2
    assert f"pytest is {pytest.__version__}, it must be <1, nosuch is missing" in line
    assert "pip install 'paged-kv[serve]'" in line


def test_the_request_that_is_printed_is_a_chat_where_the_model_has_a_template(demo, tmp_path):
    ready, curl = ready_lines(demo, "http://127.0.0.1:8000").splitlines()
    assert "http://127.0.0.1:8000" in ready
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == str(demo)
    assert body["messages"]
    assert body["temperature"] == 0  # the same text each time
    completion = ready_lines(tmp_path, "http://127.0.0.1:8000", asks_for_key=True).splitlines()[1]
    assert "Authorization" not in curl
    assert '-H "Authorization: Bearer $PAGED_KV_API_KEY"' in completion
    assert "/v1/completions" in completion
    assert json.loads(shlex.split(completion)[-1])["prompt"]


@pytest.mark.usefixtures("request_")
def test_the_cache_takes_half_of_what_the_weights_leave(demo):
    model = ServerMemory.of(load_config(demo), demo, "bfloat16", None)
    file = (demo / "model.safetensors").stat().st_size
    assert abs(file - 2 * model.weights) < 8192  # the file is float32, with a header
    assert model.token == 2 * 4 * 2 * 32 * 2  # K and V, layers, heads, head_dim, bytes
    page = 128 * model.token
    small = model.plan(128, model.weights + 2 * 11 * page)
    assert small.max_length == 10 * 128  # MAX keeps a page empty
    assert small.utilization == pytest.approx((11 * page + file) / (10 * GIB))
    assert model.plan(128, 8 * GIB).max_length == 4096
    with pytest.raises(ContractError, match="too few are left for the cache"):
        model.plan(128, model.weights + 2 * page)
    with pytest.raises(ContractError, match="too few are left for the cache"):
        model.plan(128, 0)


def test_a_wider_cache_holds_fewer_tokens(demo):
    of = {form: ServerMemory.of(load_config(demo), demo, "bfloat16", form).token for form in (None, "float32")}
    assert of["float32"] == 2 * of[None]
    assert ServerMemory.of(load_config(demo), demo, "q4_k", None).token == of["float32"]


def test_a_control_groups_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.free_memory()
    assert whole > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.free_memory() > 1 << 20
    (tmp_path / "memory.max").write_text("1500\n")
    assert memory.free_memory() == 500
