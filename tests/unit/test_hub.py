"""Models by a hub's names, against a hub on this machine: which files are fetched, what is kept, what is refused."""

import json
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from paged_kv.checkpoint import hub as hub_module
from paged_kv.checkpoint.hub import located
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import CheckpointError
from unit.hub import GATED, serving

DEMO = {file.name: file.read_bytes() for file in FOLDER.iterdir() if file.suffix in (".json", ".safetensors")}
OTHERS = {"README.md": b"words", "consolidated.safetensors": b"twice", "original/model.safetensors": b"thrice"}
TEXT = {name: data for name, data in DEMO.items() if name.endswith(".json")}
MANY = ("m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-IQ3_XXS.gguf", "m.F16.gguf", "mmproj-m-F16.gguf", "imatrix.gguf")
PARTS = tuple(f"Q8_0/m-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3))
SHARDS = {"model-1.safetensors": b"one", "model-2.safetensors": b"two"}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
BLOOM = json.dumps(json.loads(DEMO["config.json"]) | {"architectures": ["BloomForCausalLM"]}).encode()
MODULES = {
    name: name.encode()
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
}
REPOSITORIES = {
    "org/demo": DEMO | OTHERS,
    "org/embedding": DEMO | OTHERS | MODULES,
    "org/shards": TEXT | INDEX | SHARDS | OTHERS,
    "org/a-shard-short": TEXT | INDEX | {"model-1.safetensors": b"one"},
    "org/bloom": DEMO | {"config.json": BLOOM},
    "org/slow": {name: data for name, data in DEMO.items() if name != "tokenizer.json"},
    "org/many-GGUF": {name: name.encode() for name in (*MANY, *PARTS)},
    "org/one-GGUF": {"m-Q3_K_L.gguf": b"one"},
    "org/two-GGUF": {"m-Q3_K_L.gguf": b"one", "m-Q8_0.gguf": b"eight"},
    "org/pictures": {"README.md": b"words"},
    GATED: DEMO,
}


@pytest.fixture(scope="module")
def server():
    with serving(REPOSITORIES) as hub:
        yield hub


def use(endpoint, monkeypatch):
    """Sets what `HF_ENDPOINT` says where it is set before `huggingface_hub` is imported."""
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The hub, with an empty cache."""
    use(server.address, monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    server.requests.clear()
    return server


def fetched(hub) -> set[str]:
    """Return the files that were fetched, of whichever repository."""
    return {
        request.split("/", 4)[4] for request in hub.requests if request.startswith("GET") and "/resolve/" in request
    }


def test_a_checkpoint_is_fetched_once_and_only_what_it_needs(hub):
    source = open_source("org/demo")
    assert source.config == open_source(FOLDER).config
    assert source.tokenizer()[0].get_vocab() == open_source(FOLDER).tokenizer()[0].get_vocab()
    assert {name: (source.folder / name).read_bytes() for name in fetched(hub)} == DEMO
    hub.requests.clear()
    assert open_source("org/demo").folder == source.folder
    assert not hub.requests


def test_what_says_how_a_model_embeds_is_fetched_too(hub):
    located("org/embedding")
    assert fetched(hub) == {*DEMO, *MODULES}


def test_shards_are_those_of_the_index(hub):
    assert located("org/shards").joinpath("model-2.safetensors").read_bytes() == b"two"
    assert fetched(hub) == {*TEXT, *INDEX, *SHARDS}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/many-GGUF", MANY[:1]),
        ("org/many-GGUF:Q4_K_M", MANY[:1]),
        ("org/many-GGUF:q4_k_m", MANY[:1]),
        ("org/many-GGUF:UD-Q4_K_M", MANY[1:2]),
        ("org/many-GGUF:IQ3_XXS", MANY[2:3]),
        ("org/many-GGUF:F16", MANY[3:4]),
        ("org/many-GGUF:Q8_0", PARTS),
        ("org/one-GGUF", ("m-Q3_K_L.gguf",)),
    ],
)
def test_a_gguf_file_by_its_tag(hub, name, files):
    path = located(name)
    assert path.read_bytes() == files[0].encode() or path.read_bytes() == b"one"
    assert path.as_posix().endswith(files[0])
    assert fetched(hub) == set(files)
    hub.requests.clear()
    assert located(name) == path
    assert not hub.requests
    path.unlink()  # a download that was interrupted goes on
    assert located(name).exists()


@pytest.mark.usefixtures("hub")
def test_a_part_that_is_missing_from_the_cache_is_fetched():
    whole = located("org/shards")
    (whole / "model-2.safetensors").unlink()
    assert (located("org/shards") / "model-2.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/none", ["org/none: no such folder or file, and no such model at", "private"]),
        ("org/demo:Q4_K_M", ["org/demo:Q4_K_M: the hub's repository has no GGUF file, which :Q4_K_M asks for"]),
        ("org/many-GGUF:Q5_0", ["no GGUF file Q5_0; name one of F16, IQ3_XXS, Q4_K_M, Q8_0, UD-Q4_K_M behind a colon"]),
        ("org/two-GGUF", ["no GGUF file Q4_K_M; name one of Q3_K_L, Q8_0 behind a colon"]),
        ("org/pictures", ["neither safetensors of a model nor a GGUF file"]),
        ("org/a-shard-short", ["org/a-shard-short: the hub's repository lacks model-2.safetensors"]),
        ("org/bloom", ["architectures", "BloomForCausalLM"]),
        ("org/slow", ["tokenizer.json: no such file"]),
        (GATED, ["its owners decide who gets it", "hf auth login"]),
    ],
)
def test_what_the_hub_does_not_have_is_refused_before_weights_are_fetched(hub, name, words):
    with pytest.raises(CheckpointError) as refused:
        open_source(name)
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(str(refused.value).splitlines()) == 1
    assert not any(name.endswith((".gguf", ".safetensors")) for name in fetched(hub))


@pytest.mark.usefixtures("hub")
def test_a_full_disk_is_seen_before_weights_are_fetched(monkeypatch):
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(CheckpointError, match=r"org/demo: takes 0\.0 GB, and .* has room for 0\.0 GB"):
        located("org/demo")


@pytest.mark.usefixtures("hub")
def test_without_a_network_the_cache_answers(monkeypatch):
    folder = located("org/demo")
    use("http://127.0.0.1:9", monkeypatch)
    assert located("org/demo") == folder
    with pytest.raises(CheckpointError, match=r"org/shards: no such folder or file, and it cannot be had from http"):
        located("org/shards")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"org/shards: no such folder or file, not in .*HF_HUB_OFFLINE is set"):
        located("org/shards")


def test_a_path_comes_before_a_name(hub, tmp_path):
    (tmp_path / "org" / "demo").mkdir(parents=True)
    assert str(located("org/demo")) == "org/demo"
    for path in ("demo", "a/b/c", "./org", "org/model.gguf", str(tmp_path / "none")):
        assert str(located(path)) == path.removeprefix("./")
    assert not hub.requests
