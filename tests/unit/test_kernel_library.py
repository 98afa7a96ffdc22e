"""The Mojo package compiled once: which file serves which sources, with a compiler that joins the sources."""

import shutil
import stat
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.graphs.ops import compiled_kernels, kernels
from paged_kv.runtime import kernel_library as module
from paged_kv.runtime.kernel_library import kernel_library
from paged_kv.runtime.store import Store
from support.permissions import permissions_count


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paged-kv" / "kernels"


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "package"
    write(folder, **{"__init__.mojo": "from .inner.answer import answer", "inner/answer.mojo": "42"})
    return folder


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    """The folders that the compiler was given."""
    given = []

    def compile_(arguments, cwd, **_):
        _, folder, _, output = arguments
        assert not Path(folder).is_absolute()  # it would be in the code
        given.append(folder)
        texts = [file.read_text() for file in sorted(Path(cwd, folder).rglob("*.mojo"))]
        if "nothing" in texts:
            raise CalledProcessError(1, "mojo", stderr=b"answer.mojo:1: error: nothing")
        Path(output).write_text("".join(texts))

    monkeypatch.setattr(module, "subprocess_run_mojo", compile_)
    return given


def write(folder, **files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_same_sources_are_compiled_once_wherever_they_lie(sources, compiles, cache, tmp_path):
    library = kernel_library(sources)
    assert library.parent.parent == cache
    assert library.name == "mojo_ops.mojoc"  # kernels on a GPU are named after it, and known by their names
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.stat().st_mode) == 0o600
    assert kernel_library(sources) == library
    assert kernel_library(Path(shutil.copytree(sources, tmp_path / "copy"))) == library
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda sources: write(sources, **{"inner/answer.mojo": "43"}),
        lambda sources: write(sources, **{"inner/other.mojo": ""}),
        lambda sources: (sources / "inner/answer.mojo").rename(sources / "inner/reply.mojo"),
    ],
    ids=["text", "file", "name"],
)
def test_other_sources_are_another_file(sources, compiles, change):
    library = kernel_library(sources)
    change(sources)
    assert kernel_library(sources) != library
    assert len(compiles) == 2


@pytest.mark.parametrize("compiler", ["max", "mojo"])
def test_another_compiler_is_another_file(sources, monkeypatch, compiler):
    library, version = kernel_library(sources), module.version
    monkeypatch.setattr(module, "version", lambda name: "tomorrow's" if name == compiler else version(name))
    assert kernel_library(sources) != library


def test_sources_that_do_not_compile_say_where(sources, cache):
    write(sources, **{"inner/answer.mojo": "nothing"})
    with pytest.raises(ToolchainError, match=r"does not compile.*answer\.mojo:1"):
        kernel_library(sources)
    assert list(cache.iterdir()) == []


def test_sources_that_are_edited_meanwhile_leave_no_file(sources, monkeypatch, cache):
    def edit(arguments, **_):
        Path(arguments[-1]).touch()
        write(sources, **{"__init__.mojo": ""})

    monkeypatch.setattr(module, "subprocess_run_mojo", edit)
    with pytest.raises(ToolchainError, match="edited while it was compiled"):
        kernel_library(sources)
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_emptied_meanwhile_leaves_the_sources(sources, monkeypatch):
    monkeypatch.setattr(Store, "find", lambda *_: [])
    assert kernel_library(sources) == sources


def test_kernels_that_cannot_be_kept_are_compiled_from_their_sources(sources, monkeypatch, cache):
    """The sources themselves are MAX's then; it compiles them for each graph. So where the file cannot be replaced."""
    library = kernel_library(sources)
    folders = (cache, library.parent)
    with permissions_count():
        for folder in folders:
            folder.chmod(0o500)
        assert kernel_library(sources) == library
        library.write_text("damaged")
        assert kernel_library(sources) == sources
        write(sources, **{"inner/answer.mojo": "43"})
        assert kernel_library(sources) == sources
        for folder in folders:
            folder.chmod(0o700)
    write(sources, **{"inner/answer.mojo": "42"})
    assert kernel_library(sources) == library

    def full(*_, **__):
        raise CalledProcessError(1, "mojo", stderr=b"error: cannot write: No space left on device")

    monkeypatch.setattr(module, "subprocess_run_mojo", full)
    write(sources, **{"inner/answer.mojo": "44"})
    assert kernel_library(sources) == sources


def test_damaged_kernels_are_compiled_again(sources, cache, tmp_path):
    """The compiler crashes on a byte that differs, so its file has what the sealed one has, and no byte more."""
    library = kernel_library(sources)
    (sealed,) = cache.glob("*.kernels")
    whole = {file: file.read_bytes() for file in (library, sealed)}
    assert whole[sealed].startswith(whole[library])
    outside = tmp_path / "outside"
    outside.write_text("somebody's")
    for file in whole:
        for damaged in (whole[file][:-1], b"K" + whole[file][1:], whole[file] + b"\0", b"", None):
            file.unlink()
            file.symlink_to(outside) if damaged is None else file.write_bytes(damaged)
            assert kernel_library(sources) == library
            assert {file: file.read_bytes() for file in whole} == whole
            assert not library.is_symlink()
    assert outside.read_text() == "somebody's"


def test_graphs_take_the_compiled_file_inside_the_scope_alone(tmp_path):
    folder = kernels()
    with compiled_kernels(tmp_path):
        assert kernels() == tmp_path
    assert kernels() == folder
