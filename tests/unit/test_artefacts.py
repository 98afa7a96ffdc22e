"""What is compiled and what is read from disk, with a compiler that only writes down what it was given."""

import stat

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.runtime import artefacts
from paged_kv.runtime.artefacts import load_graphs
from support.fake_compiler import NAMES, Session, build, install, keys


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return install(monkeypatch, tmp_path)


def load(*names, facts=""):
    """The lists of names that had to be compiled."""
    session = Session()
    models = load_graphs(session, keys(names, facts), build)
    assert models == {name: f"model {name}" for name in names}
    return session.compiles


def test_what_is_missing_is_compiled_together_and_once(folder):
    assert load("first", "second") == [["first", "second"]]
    assert load("second") == []
    assert load("second", "third", "first") == [["third"]]
    assert load(*NAMES) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 3


def test_another_key_is_another_artefact(folder):
    load("first")
    assert load("first", facts=" of another size") == [["first"]]
    assert len(list(folder.iterdir())) == 2


def test_a_graph_whose_key_changed_is_not_taken_from_the_file_of_the_others(folder):
    """All three lie in one file; the name of one that is up to date does not make the others valid."""
    load(*NAMES)
    session = Session()
    load_graphs(session, keys(["first"]) | keys(["second", "third"], " changed"), build)
    assert session.compiles == [["second", "third"]]
    assert len(list(folder.iterdir())) == 5


def test_a_graph_may_come_back_under_the_name_of_an_equal_one(folder, monkeypatch):
    """MAX's own cache does not look at names: a graph that equals one it has compiled before gets that one's."""
    monkeypatch.setattr(Session, "init_all", lambda *_, **__: {"of an older one": "model first"})
    assert load("first") == [["first"]]
    assert load("first") == []
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_file_is_compiled_again(folder):
    load("first", "second")
    for path in folder.iterdir():
        path.write_text("cut sho")
    assert load("first", "second") == [["first", "second"]]
    assert load("first", "second") == []


def test_a_file_that_others_can_write_to_is_compiled_again(folder):
    load("first")
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert load("first") == [["first"]]
    assert load("first") == []


def test_a_link_out_of_the_folder_is_compiled_again(folder):
    load("first")
    (path,) = folder.iterdir()
    path.rename(folder.parent / "outside.graph")
    path.symlink_to(folder.parent / "outside.graph")
    assert load("first") == [["first"]]
    assert not path.is_symlink()


def test_a_folder_that_others_can_write_to_is_an_error(folder):
    load("first")
    folder.chmod(0o777)
    with pytest.raises(ToolchainError, match="artefact folder"):
        load("first")


def test_nothing_is_stored_where_the_sources_changed_during_the_compile(folder, monkeypatch):
    seen = iter(["before", "after"])
    monkeypatch.setattr(artefacts, "toolchain", lambda _=None: next(seen))
    assert load("first") == [["first"]]
    assert list(folder.iterdir()) == []


def test_a_compile_that_fails_says_why_in_one_line(folder, monkeypatch):
    """MAX puts its own words around the compiler's."""

    def fail(*_, **__):
        try:
            raise RuntimeError("Graph compilation failed:\nerror: cannot write\n  to the cache\n")
        except RuntimeError as error:
            raise RuntimeError("Failed to compile the model.\nPlease file an issue") from error

    monkeypatch.setattr(Session, "compile", fail)
    with pytest.raises(ToolchainError, match=r"^MAX cannot compile first, second: error: cannot write$"):
        load("first", "second")
    assert list(folder.iterdir()) == []
