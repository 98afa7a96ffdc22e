"""Graphs that were compiled ahead into a folder: they are found there without a compile, or not loaded at all."""

import os
import shutil
import stat

import pytest

from paged_kv.engine.step import check_target
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime import artefacts, compile_key
from paged_kv.runtime.artefacts import compile_ahead, load_graphs
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from support.fake_compiler import Session, build, compiles, install, keys
from support.permissions import permissions_count

NAME = ["first"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return install(monkeypatch, tmp_path / "caches")


@pytest.fixture
def ahead(tmp_path, cache):
    """A folder with the graph, and a cache without it."""
    folder = tmp_path / "ahead"
    (path,) = compile_ahead(Session(), keys(NAME), build, folder)
    assert path.parent == folder
    assert not list(cache.iterdir())
    return folder


def load(folder, facts=""):
    """The lists of names that had to be compiled."""
    return compiles(lambda session: load_graphs(session, keys(NAME, facts), build, compiled_ahead=folder))


def test_it_is_found_without_a_compile(ahead, cache):
    assert load(ahead) == []
    assert not list(cache.iterdir())
    assert load(None) == [NAME]


def test_what_is_there_is_not_compiled_again(ahead):
    assert compiles(lambda session: compile_ahead(session, keys(NAME), build, ahead)) == []
    assert compiles(lambda session: compile_ahead(session, keys(["first", "second"]), build, ahead)) == [["second"]]


def test_the_cache_folder_finds_what_was_compiled_into_it():
    assert compiles(lambda session: compile_ahead(session, keys(NAME), build, None)) == [NAME]
    assert load(None) == []


def test_what_the_cache_folder_has_is_copied(tmp_path):
    load(None)
    assert compiles(lambda session: compile_ahead(session, keys(NAME), build, tmp_path / "ahead")) == []
    shutil.rmtree(tmp_path / "caches")
    assert load(tmp_path / "ahead") == []


def test_another_shape_is_not_taken(ahead):
    assert load(ahead, " of another size") == [NAME]


def test_another_target_is_not_taken(ahead, monkeypatch):
    monkeypatch.setattr(artefacts, "toolchain", lambda target=None: f"for another CPU than {target}")
    assert load(ahead) == [NAME]


def test_a_lower_target_is_taken_by_a_cpu_that_runs_it(tmp_path, monkeypatch):
    def in_force(target, flags):
        for module in (artefacts, compile_key):
            monkeypatch.setattr(module, "get_virtual_cpu_target", lambda: target)
        monkeypatch.setattr(CpuInfo, "read", classmethod(lambda cls: cls("x86_64", "", flags)))

    in_force("znver4", REQUIRED_FLAGS["znver4"])
    compile_ahead(Session(), keys(NAME), build, tmp_path / "ahead")
    in_force("haswell", REQUIRED_FLAGS["haswell"])
    assert load(tmp_path / "ahead") == [NAME]
    in_force("znver5", REQUIRED_FLAGS["znver5"])
    assert load(tmp_path / "ahead") == []


@pytest.mark.parametrize("content", [b"", b"first", b"first" + bytes(100)])
def test_a_damaged_file_is_not_read(ahead, monkeypatch, content):
    (path,) = ahead.iterdir()
    path.write_bytes(content)
    monkeypatch.setattr(artefacts, "read", lambda _: pytest.fail("MAX sees it"))
    assert load(ahead) == [NAME]


def test_another_graphs_file_is_not_taken(ahead):
    (mine,), (other,) = (
        compile_ahead(Session(), keys(NAME, facts), build, ahead) for facts in ("", " of another size")
    )
    shutil.copyfile(mine, other)
    assert load(ahead, " of another size") == [NAME]


def test_a_folder_that_others_can_write_to_is_refused(ahead):
    ahead.chmod(0o777)
    with pytest.raises(ToolchainError, match=r"artefact folder .* mode drwxrwxrwx"):
        load(ahead)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_refused(ahead):
    os.chown(ahead, 65534, -1)
    with pytest.raises(ToolchainError, match=r"artefact folder .* owner 65534"):
        load(ahead)


def test_a_file_that_others_can_write_to_is_not_taken(ahead):
    (path,) = ahead.iterdir()
    path.chmod(0o666)
    assert load(ahead) == [NAME]


def test_a_folder_that_is_missing_is_refused_and_not_made(tmp_path):
    with pytest.raises(ToolchainError, match="no folder of compiled steps"):
        load(tmp_path / "ahead")
    assert not (tmp_path / "ahead").exists()


def test_a_folder_that_cannot_be_written_is_read(ahead):
    ahead.chmod(0o555)
    with permissions_count():
        assert load(ahead) == []
        with pytest.raises(ToolchainError, match=r"cannot be kept: .*ahead: Permission denied"):
            compile_ahead(Session(), keys(["second"]), build, ahead)


def test_a_named_folder_keeps_its_mode(tmp_path):
    folder = tmp_path / "ahead"
    folder.mkdir()
    folder.chmod(0o755)
    compile_ahead(Session(), keys(NAME), build, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_source_that_is_edited_meanwhile_is_not_kept(tmp_path, monkeypatch):
    seen = iter(["before", "after"])
    monkeypatch.setattr(artefacts, "toolchain", lambda _=None: next(seen))
    with pytest.raises(ToolchainError, match="edited while"):
        compile_ahead(Session(), keys(NAME), build, tmp_path / "ahead")
    assert not list((tmp_path / "ahead").iterdir())


def test_an_unknown_target_is_refused_before_max_aborts_the_process():
    check_target(None)
    check_target("znver5")
    with pytest.raises(ContractError, match=r"target must be one of .*haswell, not 'pentium'"):
        check_target("pentium")
