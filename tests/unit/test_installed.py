"""Compiled graphs that come with the package: only what is whole, of these sources and for this CPU is read."""

import builtins
import json
import lzma
import os

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.runtime import installed
from paged_kv.runtime.artefacts import load_graphs, where_graphs_lie
from paged_kv.runtime.compile_key import CompileKey, Sources, toolchain
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from paged_kv.runtime.installed import FORMAT, INDEX, Index, InstalledStore, kernel_roots, read_compressed
from paged_kv.runtime.store import seal
from support import fake_compiler
from support.fake_compiler import set_cpu

A, B, C = "a" * 32, "b" * 32, "c" * 32
CONTENT = bytes(range(256)) * 12
ZEN5 = CpuInfo("x86_64", "a CPU", REQUIRED_FLAGS["znver5"])


def put(path, content=CONTENT, names=(A, B)):
    path.write_bytes(lzma.compress(content))
    seal(path, names)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "znver4"
    path.mkdir()
    put(path / "two.graph.xz")
    put(path / "one.graph.xz", b"another", [C])
    graphs = {digest: {"name": digest[0], "file": "two.graph.xz"} for digest in (A, B)}
    graphs[C] = {"name": "c", "file": "one.graph.xz"}
    Index("znver4", REQUIRED_FLAGS["znver4"], {"max": "26.7.0"}, graphs).write(path / INDEX)
    return path


def found(folder, *digests):
    return [(artefact.content, artefact.digests) for artefact in InstalledStore(folder, ZEN5).find(digests)]


def damaged(folder, *digests):
    """The report, where something must be said."""
    with pytest.warns(RuntimeWarning, match=r"is not read \(.*\): reinstall it$"):
        return found(folder, *digests)


# One folder


def test_each_file_is_read_once_and_may_be_anybodys(folder):
    """Read-only, of any mode, linked from elsewhere: it is trusted as the package's code beside it is."""
    for file in folder.iterdir():
        file.chmod(0o464)
    (folder / "two.graph.xz").rename(folder.parent / "elsewhere")
    (folder / "two.graph.xz").symlink_to(folder.parent / "elsewhere")
    assert found(folder, A, B, C) == [(CONTENT, {A, B}), (b"another", {C})]
    assert found(folder, B) == [(CONTENT, {B})]
    assert found(folder, "d" * 32) == []


def test_nothing_is_taken_where_the_index_asks_for_more(folder):
    """A target may ask for other flags one day: what the folder was made for counts."""
    index = Index.read(folder / INDEX)
    Index("znver4", index.requires | {"a new one"}, index.versions, index.graphs).write(folder / INDEX)
    assert found(folder, A, B, C) == []


def flipped(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:99] + bytes([whole[99] ^ 0x10]) + whole[100:])


def cut(path):
    path.write_bytes(path.read_bytes()[:-49])


def not_compressed(path):
    path.write_bytes(CONTENT)
    seal(path, [A, B])


def of_other_graphs(path):
    """Whole: of another target or version."""
    put(path, names=["e" * 32, "f" * 32])


def no_file(make):
    def replace(path):
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize(
    "damage",
    [
        *(flipped, cut, not_compressed, of_other_graphs),
        *(map(no_file, (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda _: None))),
    ],
)
def test_what_is_not_the_indexs_file_is_not_read(folder, damage):
    damage(folder / "two.graph.xz")
    assert damaged(folder, A, C) == [(b"another", {C})]


@pytest.mark.parametrize(
    "change",
    [
        {"format": FORMAT + 1},
        {"graphs": {A: {"name": "a", "file": "../znver5/two.graph.xz"}}},
        {"graphs": {A: {"name": "a", "file": "/etc/passwd"}}},
        {"graphs": {A: {"name": "a"}}},
        {"graphs": {A: "two.graph.xz"}},
        {"graphs": None},
        {"requires": 3},
        *("", "[]", "{}", "null", '{"format": 1', "[" * 100_000, "\xff", None),
    ],
    ids=range(15),
)
def test_an_index_of_another_form_is_not_read(folder, change):
    """Nor a file that it leads to outside."""
    (folder.parent / "znver5").mkdir()
    put(folder.parent / "znver5" / "two.graph.xz")
    if isinstance(change, dict):
        change = json.dumps(json.loads((folder / INDEX).read_text()) | change)
    (folder / INDEX).unlink() if change is None else (folder / INDEX).write_bytes(change.encode("latin-1"))
    assert damaged(folder, A) == []


def test_the_index_has_one_form(folder):
    index = Index.read(folder / INDEX)
    before = (folder / INDEX).read_bytes()
    Index(index.target, index.requires, index.versions, dict(reversed(index.graphs.items()))).write(folder / INDEX)
    assert (folder / INDEX).read_bytes() == before


def test_a_python_without_lzma_says_so(folder, monkeypatch):
    def refuse(name, *rest):
        if name == "lzma":
            raise ImportError(name)
        return imported(name, *rest)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match="without lzma"):
        read_compressed(folder / "two.graph.xz")


def test_both_places_are_searched(tmp_path, monkeypatch):
    (tmp_path / "paged_kv_kernels").mkdir()
    (tmp_path / "paged_kv_kernels" / "__init__.py").touch()
    inside = kernel_roots()
    assert [root.parts[-2:] for root in inside] == [("paged_kv", "kernels")]
    monkeypatch.syspath_prepend(tmp_path)
    assert kernel_roots() == [*inside, tmp_path / "paged_kv_kernels"]


# Which file a CPU takes: one for its own target, then an installed one for a lower target, then a compile

KEY = CompileKey("graph")
LEVELS = ("haswell", "skylake-avx512", "znver4", "znver5", "sapphirerapids")
"""The files of the package."""
BEST = {level: level for level in LEVELS} | {
    "graniterapids": "sapphirerapids",
    "znver3": "haswell",
    "znver2": "haswell",
}
BEST |= dict.fromkeys(("cooperlake", "icelake-server", "cascadelake"), "skylake-avx512")


class Session(fake_compiler.Session):
    def init_all(self, compiled, weights_registry):  # noqa: ARG002
        return {"graph": " ".join(compiled.names)}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with kernels for LEVELS; the function makes its CPU and target, and says what a call gets."""
    folder = fake_compiler.install(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(installed, "kernel_roots", lambda: [tmp_path / "kernels"])
    for target in LEVELS:
        ship(tmp_path / "kernels" / target, target, f"for {target}")

    def load(flags, target=None, **options):
        set_cpu(monkeypatch, flags, target)
        build = lambda module, _: module.append("compiled here")  # noqa: E731
        return load_graphs(Session(), {"graph": KEY}, build, **options)["graph"]

    load.kernels = tmp_path / "kernels"
    load.cache = folder
    return load


def ship(folder, target, text):
    digest = KEY.digest(Sources.installed(), toolchain(target))
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "graph.graph.xz", text.encode(), [digest])
    graphs = {digest: {"name": "graph", "file": "graph.graph.xz"}}
    Index(target, REQUIRED_FLAGS[target], {}, graphs).write(folder / INDEX)


@pytest.mark.parametrize("cpu", REQUIRED_FLAGS)
def test_every_cpu_with_avx2_finds_kernels(machine, cpu):
    assert machine(REQUIRED_FLAGS[cpu]) == f"for {BEST[cpu]}"
    assert not machine.cache.exists() or not list(machine.cache.iterdir())  # nothing was compiled or kept


@pytest.mark.parametrize("forced", REQUIRED_FLAGS)
def test_a_forced_target_takes_what_it_and_the_cpu_can_run(machine, forced):
    """On a CPU that can run it; elsewhere nothing is loaded, from nowhere, as it would end the process."""
    zen5 = REQUIRED_FLAGS["znver5"]
    if REQUIRED_FLAGS[forced] <= zen5:
        assert machine(zen5, forced) == f"for {BEST[forced]}"
    else:
        lacking = ", ".join(sorted(REQUIRED_FLAGS[forced] - zen5))
        with pytest.raises(ToolchainError, match=f"^CPU target {forced} is in force, .* does not report {lacking}: "):
            machine(zen5, forced)
        assert not machine.cache.exists()


@pytest.mark.parametrize(
    ("flags", "forced"),
    [("znver5", "x86-64"), ("znver5", "x86-64-v3"), (REQUIRED_FLAGS["haswell"] - {"avx2"}, None), ((), None)],
)
def test_a_target_that_asks_for_nothing_known_takes_nothing(machine, flags, forced):
    assert machine(REQUIRED_FLAGS.get(flags, flags), forced) == "compiled here"


def test_what_was_compiled_for_this_very_cpu_is_better_than_a_lower_target(machine):
    flags = REQUIRED_FLAGS["icelake-server"]
    assert machine(flags) == "for skylake-avx512"
    assert where_graphs_lie({"graph": KEY}) == {"graph": "with the package, for skylake-avx512"}
    assert machine(flags, exact=True) == "compiled here"
    assert machine(flags) == "compiled here"
    assert where_graphs_lie({"graph": KEY, "other": CompileKey("")}) == {"graph": "in the cache, for icelake-server"}
    assert machine(flags, "cascadelake") == "for skylake-avx512"


def test_a_cache_folder_that_is_not_needed_may_be_unusable(machine, monkeypatch):
    """It is looked into for what is not installed alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert machine(REQUIRED_FLAGS["znver5"]) == "for znver5"
    with pytest.raises(ToolchainError, match="no cache folder"):
        machine(REQUIRED_FLAGS["cascadelake"])


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("it is damaged", lambda folder: cut(folder / "graph.graph.xz")),
        ("MAX refuses it", lambda folder: ship(folder, "haswell", "unreadable")),
    ],
)
def test_what_is_not_read_is_compiled_and_stays_as_it_is(machine, said, damage):
    damage(folder := machine.kernels / "haswell")
    before = (folder / "graph.graph.xz").read_bytes()
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=said):
            assert machine(REQUIRED_FLAGS["haswell"]) == "compiled here"
    assert (folder / "graph.graph.xz").read_bytes() == before
    assert len(list(machine.cache.iterdir())) == 1
