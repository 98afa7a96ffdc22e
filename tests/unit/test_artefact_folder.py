"""Artefacts are code: whose they must be, what is never loaded, and names that appear whole."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.artefact_folder import ArtefactFolder

A, B, C = "a" * 32, "b" * 32, "0123456789abcdef" * 2
OTHER_USER = 12345
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root gives a file to another user")


@pytest.fixture
def folder(tmp_path):
    return ArtefactFolder(tmp_path / "compiled")


def write(text):
    return lambda path: path.write_text(text)


def texts(folder, *digests):
    return [artefact.content.decode() for artefact in folder.find(digests)]


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_folder_and_its_files_are_the_users_alone(folder):
    before = os.umask(0)
    try:
        made = ArtefactFolder(folder.path.with_name("made"))
        made.store([A, B], write("code"))
    finally:
        os.umask(before)
    assert mode(made.path) == 0o700
    assert {mode(path) for path in made.path.iterdir()} == {0o600}


def test_one_file_has_several_names_and_is_found_once(folder):
    folder.store([A, B], write("both"))
    folder.store([C], write("alone"))
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(f"{name}.graph" for name in (A, B, C))
    assert texts(folder, A, B) == ["both"]
    assert texts(folder, B) == ["both"]
    assert sorted(texts(folder, A, B, C)) == ["alone", "both"]
    assert folder.find(["f" * 32]) == []
    both, alone = sorted(folder.find([B, C, A]), key=lambda artefact: artefact.content, reverse=True)
    assert (both.digests, alone.digests) == ({A, B}, {C})


def test_a_name_is_replaced_and_the_others_stay(folder):
    folder.store([A, B], write("old"))
    folder.store([A], write("new"))
    assert texts(folder, A) == ["new"]
    assert texts(folder, B) == ["old"]
    folder.store([A, B], write("newer"))
    assert texts(folder, A, B) == ["newer"]


def test_a_removed_name_is_missing(folder):
    folder.store([A, B], write("damaged"))
    folder.remove(folder.path / f"{A}.graph")
    assert folder.find([A]) == []
    assert [artefact.path.name for artefact in folder.find([B])] == [f"{B}.graph"]
    folder.remove(folder.path / f"{A}.graph")  # another process may have done it


def test_without_hard_links_each_name_is_a_copy(folder, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", refuse)
    folder.store([A, B], write("both"))
    assert texts(folder, A, B) == ["both", "both"]
    assert {mode(path) for path in folder.path.iterdir()} == {0o600}


def test_a_write_that_fails_leaves_nothing(folder):
    folder.store([A], write("old"))

    def fail(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    assert folder.store([A, B], fail) == f"{folder.path}: No space left on device"
    assert [path.name for path in folder.path.iterdir()] == [f"{A}.graph"]
    assert texts(folder, A, B) == ["old"]


def test_two_writers_leave_one_whole_file_under_each_name(folder):
    written = [letter * 100_000 for letter in "uvwx"]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            list(pool.map(lambda text: folder.store([A, B], write(text)), written))
            for name in (A, B):
                assert texts(folder, name)[0] in written
    assert len(list(folder.path.iterdir())) == 2


@pytest.mark.parametrize("name", ["", "a" * 31, "a" * 33, "A" * 32, "../" + "a" * 29, "g" * 32, "a" * 32 + "\n"])
def test_a_name_that_is_no_digest_is_refused(folder, name):
    with pytest.raises(ContractError, match="32 hexadecimal digits"):
        folder.find([name])
    with pytest.raises(ContractError, match="32 hexadecimal digits"):
        folder.store([name], write("code"))
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("permissions", [0o755, 0o750, 0o711])
def test_a_folder_that_others_can_read_is_closed(tmp_path, permissions):
    path = tmp_path / "compiled"
    path.mkdir()
    path.chmod(permissions)
    ArtefactFolder(path)
    assert mode(path) == 0o700


@pytest.mark.parametrize("permissions", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, permissions):
    path = tmp_path / "compiled"
    path.mkdir()
    path.chmod(permissions)
    with pytest.raises(ToolchainError) as caught:
        ArtefactFolder(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"owner {os.geteuid()}" in message
    assert stat.filemode(path.stat().st_mode) in message
    assert mode(path) == permissions  # left for the user to look at


@needs_root
def test_another_users_folder_is_refused(tmp_path):
    path = tmp_path / "compiled"
    path.mkdir(mode=0o700)
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(ToolchainError, match=f"{path} has owner {OTHER_USER} and mode drwx------.*user 0"):
        ArtefactFolder(path)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_refused(tmp_path, kind):
    path = tmp_path / "compiled"
    if kind == "file":
        path.write_text("")
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to("elsewhere")
    with pytest.raises(ToolchainError, match=f"artefact folder {path}"):
        ArtefactFolder(path)


def refused_then_rebuilt(folder):
    """The file A is never loaded, and a new one takes its name."""
    assert folder.find([A]) == []
    folder.store([A], write("rebuilt"))
    assert texts(folder, A) == ["rebuilt"]


@pytest.mark.parametrize("permissions", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_to_is_not_loaded(folder, permissions):
    folder.store([A], write("code"))
    (folder.path / f"{A}.graph").chmod(permissions)
    refused_then_rebuilt(folder)


@needs_root
def test_another_users_file_is_not_loaded(folder):
    folder.store([A], write("code"))
    os.chown(folder.path / f"{A}.graph", OTHER_USER, -1)
    refused_then_rebuilt(folder)


@pytest.mark.parametrize("inside", [False, True])
def test_a_symbolic_link_is_not_followed(folder, inside):
    folder.store([B], write("code"))
    target = folder.path / f"{B}.graph"
    if not inside:
        target = target.rename(folder.path.with_name("outside.graph"))
    (folder.path / f"{A}.graph").symlink_to(target)
    refused_then_rebuilt(folder)
    assert target.read_bytes().startswith(b"code")


def test_a_pipe_is_not_opened(folder):
    os.mkfifo(folder.path / f"{A}.graph")
    refused_then_rebuilt(folder)
