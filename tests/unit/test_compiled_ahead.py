"""Folders of compiled graphs that come with the package: only what is whole and what this CPU can run is read."""

import builtins
import json
import lzma
import os
import random

import pytest

from paged_kv.runtime.compiled_ahead import FORMAT, INDEX, Index, TargetFolder, kernel_roots, read_compressed
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from paged_kv.runtime.seal import write_seal

A, B, C = "a" * 32, "b" * 32, "c" * 32
CONTENT = random.Random(0).randbytes(3000)
ZEN5 = CpuInfo("x86_64", "a CPU", REQUIRED_FLAGS["znver5"])


def put(path, content=CONTENT, names=(A, B)):
    path.write_bytes(lzma.compress(content))
    write_seal(path, names)


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


def found(folder, *digests, cpu=ZEN5):
    return [(artefact.content, artefact.digests) for artefact in TargetFolder(folder, cpu).find(digests)]


def damaged(folder, *digests):
    """What is found, where something must be said."""
    with pytest.warns(RuntimeWarning, match=r"is not read \(.*\): reinstall it$"):
        return found(folder, *digests)


def test_each_file_is_read_once(folder):
    assert found(folder, A, B, C) == [(CONTENT, {A, B}), (b"another", {C})]
    assert found(folder, B) == [(CONTENT, {B})]
    assert found(folder, "d" * 32) == []


def test_an_installed_package_may_be_anybodys(folder):
    """Read-only, of any mode, linked from elsewhere: it is trusted as the package's code beside it is."""
    for file in folder.iterdir():
        file.chmod(0o464)
    (folder / "two.graph.xz").rename(folder.parent / "elsewhere")
    (folder / "two.graph.xz").symlink_to(folder.parent / "elsewhere")
    assert found(folder, A) == [(CONTENT, {A})]


@pytest.mark.parametrize("flag", sorted(REQUIRED_FLAGS["znver4"]))
def test_nothing_is_taken_where_the_cpu_lacks_a_flag(folder, flag):
    lesser = CpuInfo("x86_64", "znver4 by its name", REQUIRED_FLAGS["znver5"] - {flag})
    assert found(folder, A, B, C, cpu=lesser) == []


def test_nothing_is_taken_where_the_index_asks_for_more(folder):
    """A target may ask for other flags one day: what the folder was made for counts."""
    index = Index.read(folder / INDEX)
    Index("znver4", index.requires | {"amx_tile"}, index.versions, index.graphs).write(folder / INDEX)
    assert found(folder, A) == []


def test_every_flipped_byte_is_found(folder):
    path = folder / "two.graph.xz"
    whole = path.read_bytes()
    for at in [*range(0, len(whole), 61), *range(len(whole) - 120, len(whole))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert damaged(folder, A, C) == [(b"another", {C})]
    path.write_bytes(whole)
    assert found(folder, A) == [(CONTENT, {A})]


@pytest.mark.parametrize("length", [0, 1, 47, 100, 3000, -49, -1])
def test_a_file_that_is_cut_short_is_found(folder, length):
    whole = (folder / "two.graph.xz").read_bytes()
    (folder / "two.graph.xz").write_bytes(whole[:length])
    assert damaged(folder, A) == []


def test_sealed_content_that_is_not_compressed_is_found(folder):
    (folder / "two.graph.xz").write_bytes(CONTENT)
    write_seal(folder / "two.graph.xz", [A, B])
    assert damaged(folder, A) == []


def test_a_whole_file_of_other_graphs_is_found(folder):
    """One of another target or another version, under this name."""
    put(folder / "two.graph.xz", names=["e" * 32, "f" * 32])
    assert damaged(folder, A) == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda _: None])
def test_what_is_no_file_is_found(folder, make):
    (folder / "two.graph.xz").unlink()
    make(folder / "two.graph.xz")
    assert damaged(folder, A) == []


def test_nothing_is_removed_from_an_installation(folder):
    (folder / "two.graph.xz").write_bytes(b"damaged")
    assert damaged(folder, A) == []
    with pytest.warns(RuntimeWarning, match="MAX refuses it"):
        TargetFolder(folder, ZEN5).remove(folder / "one.graph.xz")
    assert {path.name for path in folder.iterdir()} == {INDEX, "one.graph.xz", "two.graph.xz"}


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
    ],
)
def test_an_index_of_another_form_is_not_read(folder, change):
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(content | change))
    assert damaged(folder, A) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1', "[" * 100_000, "\xff"])
def test_a_damaged_index_is_not_read(folder, text):
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    assert damaged(folder, A) == []


def test_a_missing_index_is_said_and_a_missing_folder_is_not(folder, tmp_path):
    (folder / INDEX).unlink()
    assert damaged(folder, A) == []
    assert found(tmp_path / "haswell", A) == []


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
