"""The bundle for a GPU host: pieces within their limits, unpacked as they were; graphs under names that it knows."""

import json
import os
import random
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_bundle import contents, graphs
from benchmarks.gpu_bundle.contents import PIECE_BYTES, pack, pieces
from benchmarks.gpu_bundle.graphs import Wanted
from paged_kv.runtime.store import user_store
from paged_kv.versions import VERSION

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIECE = 100_000


@pytest.fixture
def sent(tmp_path):
    """Two archives in pieces: random bytes do not shrink."""
    rng = random.Random(0)
    archives = []
    for name, size in (("first", 50_000), ("second", 300_000)):
        folder = tmp_path / name / "inner"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(rng.randbytes(size))
        (folder / "program").write_text("#!/bin/sh\necho it runs\n")
        (folder / "program").chmod(0o755)
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "old.pyc").write_bytes(b"old")
        archives.append(pack(tmp_path / name, name, tmp_path / f"{name}.tar.xz"))
    return pieces(archives, tmp_path / "send", PIECE)


def unpack(folder, target):
    command = ["sh", folder / "install.sh", target]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_pieces_keep_their_limit(sent):
    sizes = {path.name: path.stat().st_size for path in sent.glob("*.tar.xz.*")}
    assert len(sizes) == 1 + 4
    assert max(sizes.values()) <= PIECE
    assert PIECE_BYTES <= 29_000_000


def test_what_is_unpacked_is_what_was_packed(sent, tmp_path):
    target = tmp_path / "host"
    assert unpack(sent, target).returncode == 0
    for name in ("first", "second"):
        for file in ("data", "program"):
            unpacked = target / name / "inner" / file
            assert unpacked.read_bytes() == (tmp_path / name / "inner" / file).read_bytes()
        program = target / name / "inner" / "program"
        assert subprocess.run([program], capture_output=True, text=True, timeout=300, check=True).stdout == "it runs\n"
        assert not (target / name / "inner" / "__pycache__").exists()
    assert {path.name for path in target.iterdir()} == {"first", "second"}


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_piece_that_is_not_as_it_was_sent_is_refused(sent, tmp_path, fault):
    piece = sent / "first.tar.xz.00"
    if fault == "missing":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[len(content) // 2] ^= 1
        piece.write_bytes(content)
    result = unpack(sent, tmp_path / "host")
    assert result.returncode == 1
    assert "first.tar.xz.00" in result.stdout + result.stderr
    assert not (tmp_path / "host" / "first").exists()


KEYS = """
import json, os, sys
from benchmarks.gpu_bundle import families, graphs
families.make_models(families.models_path())
graphs.use_host_target(sys.argv[1], virtual=True)
from max.dtype import DType
from benchmarks import gpu_graphs
from paged_kv.runtime import artefacts, libraries, session
from paged_kv.runtime.compile_key import Sources, toolchain

asked = []
def load_graphs(_, keys, *args, **kwargs):
    asked.append({name: key.digest(Sources.installed(), toolchain()) for name, key in keys.items()})
    return dict.fromkeys(keys)

session.load_graphs = gpu_graphs.load_graphs = graphs.compile_ahead = load_graphs
libraries._paths = lambda wanted, **_: load_graphs(None, {"": wanted[0].key()}) and dict.fromkeys(wanted)
libraries._loaded = lambda *_: None
runtime = session.runtime_on(0 if sys.argv[1] == "gpu" else None)
for wanted in graphs.wanted(sys.argv[1]):
    wanted.compile()
    if wanted.name == "attention_bfloat16_bfloat16":  # the harness of tests/gpu takes the API's graph
        gpu_graphs.attention(runtime, DType.bfloat16, DType.bfloat16).load(runtime)
        assert asked.pop() == asked[-1]
    print(json.dumps([wanted.name, sorted(graphs.digests_of(wanted).values()), sorted(asked.pop().values())]))
print(json.dumps([toolchain(), session.runtime_on(0 if sys.argv[1] == "gpu" else None).architecture, ""]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "architecture", "attention"),
    [("gpu", "cuda sm_90a 0", "attention_bfloat16_bfloat16"), ("cpu", "", "pages_bfloat16_bfloat16")],
)
def test_the_hosts_processes_look_for_the_names_that_are_packed(device, architecture, attention, tmp_path):
    """A runtime asks for each graph under the digest that the bundle takes for it, for a CPU that any host has."""
    command = [sys.executable, "-c", KEYS, device]
    folders = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "tests")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | folders)
    assert result.returncode == 0, result.stderr
    *listed, (tools, found, _) = map(json.loads, result.stdout.splitlines())
    assert tools.endswith(" for haswell")
    assert found == architecture
    assert {"add_one", attention} <= {name for name, *_ in listed}
    for name, packed, asked in listed:
        assert packed == asked, name
    digests = [digest for _, packed, _ in listed for digest in packed]
    assert len(set(digests)) == len(digests) >= len(listed)


def test_graphs_of_older_sources_are_left_out(tmp_path):
    cache = tmp_path / "cache" / "paged-kv"
    (cache / "compiled").mkdir(parents=True)
    for name in ("a" * 32, "b" * 32, "c" * 32):
        (cache / "compiled" / f"{name}.graph").write_text(name)
    for device, letter in (("cpu", "a"), ("gpu", "c")):
        contents.forget_older_graphs(tmp_path)
        assert len(list((cache / "compiled").iterdir())) == 3  # what the other device needs is not known yet
        (cache / f"{device}.json").write_text(json.dumps({"add_one": {"add_one": letter * 32}}))
    contents.forget_older_graphs(tmp_path)
    assert sorted(path.stem[0] for path in (cache / "compiled").iterdir()) == ["a", "c"]


def test_a_wheel_is_laid_out_without_what_no_step_runs(tmp_path):
    (tmp_path / "wheels").mkdir()
    names = ("max/engine/api.py", "max/engine/api.pyi", "max/serve/api.py")
    names += ("max-1.data/platlib/max/core.so", "max-1.data/data/x")
    with zipfile.ZipFile(tmp_path / "wheels" / "max-1-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
    contents.wheels(tmp_path, tmp_path / "wheels")
    laid = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert laid == {"max/engine/api.py", "max/core.so"}


LAY_OUT = """
import sys
from importlib.metadata import version
from pathlib import Path
from benchmarks.gpu_bundle import contents
contents.own_package(Path(sys.argv[1]))
print(version("paged_kv"))
"""


@pytest.mark.slow
def test_the_package_is_laid_out_as_it_is_installed(tmp_path):
    """Every source is there, where imports find it, of a package that was installed without `-e` too: keys of compiled
    graphs are digests of these files.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    contents.own_package(first)
    packages = PYPROJECT["tool"]["setuptools"]["package-dir"]
    for package, folder in packages.items():
        for source in (ROOT / folder).rglob("*"):
            inner = source.relative_to(ROOT / folder)
            if source.suffix in (".py", ".mojo") and "results" not in inner.parts:
                assert (first.joinpath(*package.split("."), inner)).read_bytes() == source.read_bytes()
    command = [sys.executable, "-c", LAY_OUT, second]  # the package is that of `first`, programs are the checkout's
    env = {**os.environ, "PYTHONPATH": str(first)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == VERSION
    listed = [{path.relative_to(site) for path in site.rglob("*.*")} for site in (first, second)]
    assert listed[0] - listed[1] == {path for path in listed[0] if "__pycache__" in path.parts}


def test_graphs_get_the_names_that_another_host_looks_for(tmp_path, monkeypatch):
    """The same files serve where MAX calls the GPU's architecture something else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graphs, "digests_of", lambda wanted: wanted.keys)
    packed = [Wanted("add_one", {"add_one": "a" * 32}, None), Wanted("plain", {"attention": "b" * 32}, None)]
    monkeypatch.setattr(graphs, "wanted", lambda _: packed)
    folder = user_store()
    folder.keep(["a" * 32], lambda path: path.write_bytes(b"one"))
    (tmp_path / "paged-kv" / "gpu.json").write_text(json.dumps({wanted.name: wanted.keys for wanted in packed}))
    assert graphs.adopt("gpu") == "0 graphs renamed; not in the bundle: plain"
    folder.keep(["b" * 32], lambda path: path.write_bytes(b"two"))
    assert graphs.adopt("gpu") == "every graph has the name that this host looks for"
    there = [Wanted("add_one", {"add_one": "c" * 32}, None), Wanted("plain", {"attention": "d" * 32}, None)]
    monkeypatch.setattr(graphs, "wanted", lambda _: there)
    assert graphs.adopt("gpu") == "2 graphs renamed"
    assert [artefact.content for artefact in folder.find(["c" * 32, "d" * 32])] == [b"one", b"two"]
