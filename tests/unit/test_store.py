"""Artefacts are code: whose they must be, what never reaches a reader, what appears whole, and what is left alone."""

import io
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from paged_kv import files
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.store import Store, read_sealed
from support.limits import limited

A, B, C = "a" * 32, "b" * 32, "0123456789abcdef" * 2
CONTENT = random.Random(0).randbytes(5000)
OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")


@pytest.fixture
def store(tmp_path):
    """One file under the names A and B."""
    store = Store(tmp_path / "compiled")
    keep(store, A, B)
    return store


def keep(store, *digests, content=CONTENT):
    return store.keep(digests, lambda path: path.write_bytes(content))


@pytest.fixture
def whole(store):
    return store.path_of(A).read_bytes()


def contents(store, *digests):
    return [artefact.content for artefact in store.find(digests)]


def put(store, data, digest=A):
    """Replaces one name; the other keeps the whole file."""
    store.path_of(digest).unlink(missing_ok=True)
    store.path_of(digest).write_bytes(data)


def assert_removed(store, digest=A):
    """It is not found, is gone, and the other name's file is as it was."""
    assert contents(store, digest) == []
    assert not os.path.lexists(store.path_of(digest))
    assert contents(store, B, digest) == [CONTENT]


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


# What is kept


def test_one_file_has_several_names_and_is_found_once(store, whole):
    assert whole.startswith(CONTENT)
    assert len(whole) > len(CONTENT)
    assert contents(store, A, B) == contents(store, B) == [CONTENT]
    keep(store, C, content=b"alone")
    assert sorted(path.name for path in store.path.iterdir()) == sorted(f"{name}.graph" for name in (A, B, C))
    both, alone = store.find([B, C, A, "f" * 32])
    assert (both.content, both.digests, both.names) == (CONTENT, {A, B}, {A, B})
    assert (alone.content, alone.digests, alone.names) == (b"alone", {C}, {C})


def test_without_hard_links_each_name_is_a_copy(store, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", refuse)
    keep(store, A, B, content=b"both")
    assert contents(store, A, B) == [b"both", b"both"]
    assert {mode(path) for path in store.path.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["", "a" * 31, "a" * 33, "A" * 32, "../" + "a" * 29, "g" * 32, "a" * 32 + "\n"])
def test_a_name_that_is_no_digest_is_refused(store, name):
    for call in (store.find, lambda names: keep(store, *names)):
        with pytest.raises(ContractError, match="32 hexadecimal digits"):
            call([name])


def test_what_else_lies_in_the_folder_stays(store):
    """A folder under an artefact's name too: nothing is kept under that name, and nothing in it is touched."""
    store.path_of(C).mkdir()
    others = ["notes.txt", f"{A}.graph.bak", f"{A}.mef", ".hidden", "A" * 32 + ".graph", f"{C}.graph/file"]
    for name in others:
        (store.path / name).write_text("somebody's")
    put(store, b"damaged")
    assert contents(store, A, B, C) == [CONTENT]
    assert keep(store, A) is None
    assert keep(store, C) == f"{store.path}: Is a directory"
    assert all((store.path / name).read_text() == "somebody's" for name in others)
    assert len(list(store.path.iterdir())) == len(others) + 2


# Damage


def test_every_flipped_byte_is_found(store, whole):
    for at in [*range(0, len(CONTENT), 97), *range(len(CONTENT), len(whole))]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x20
        put(store, damaged)
        assert_removed(store)


def test_a_file_that_is_cut_short_or_too_long_or_has_no_seal_is_found(store, whole):
    cuts = (0, 1, 47, 48, 49, 4999, 5000, 5064, -57, -49, -48, -1)
    wrong = [*(whole[:length] for length in cuts), *(whole[-length or len(whole) :] for length in cuts)]
    for more in (b"\0", b"PKV-SEAL", bytes(56)):
        wrong += [whole + more, more + whole]
    for data in [*wrong, bytes(5000), bytes(56) + b"PKV-SEAL", b"\xff" * 5000, CONTENT]:
        put(store, data)
        assert_removed(store)
    with open(store.path_of(B), "r+b") as file:  # one file of two names
        file.write(b"damage")
    os.link(store.path_of(B), store.path_of(A))
    assert contents(store, A, B) == []
    assert list(store.path.iterdir()) == []


def test_a_whole_file_under_another_name_is_found(store, whole):
    """It is not the graph that this name stands for."""
    put(store, whole, C)
    assert_removed(store, C)
    os.link(store.path_of(A), store.path_of(C))
    assert contents(store, A, C) == [CONTENT]
    assert not store.path_of(C).exists()


def test_a_file_of_absurd_size_is_not_read(store, whole, monkeypatch):
    """A sparse file: a terabyte that costs nothing on disk, with and without a seal at its end."""
    count = 0

    class Counted(io.FileIO):
        def readinto(self, buffer):
            nonlocal count
            count += len(buffer)
            assert count < 1 << 20, "it is read"
            return super().readinto(buffer)

        def readall(self):
            pytest.fail("it is read whole")

    counted = lambda path, mode, opener, **_: io.BufferedReader(Counted(path, mode, opener=opener))  # noqa: E731
    monkeypatch.setattr(files, "open", counted, raising=False)
    for seal in (b"", whole[5000:]):
        put(store, b"")
        os.truncate(store.path_of(A), 1 << 40)
        with store.path_of(A).open("ab") as file:
            file.write(seal)
        assert_removed(store)
    assert count > 0


def test_a_file_that_shrinks_while_it_is_read_is_not_whole(store):
    with open(store.path_of(A), "rb", buffering=0) as file:

        class Shrinking:
            seek, fileno = file.seek, file.fileno

            def read(self, count):
                part = file.read(count)
                if part.endswith(b"PKV-SEAL"):
                    os.truncate(store.path_of(A), 100)
                return part

        assert read_sealed(store.path_of(A), Shrinking()) is None


# Whose it is


def test_the_folder_and_its_files_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        store = Store(tmp_path / "compiled")
        keep(store, A, B)
    finally:
        os.umask(before)
    assert mode(store.path) == 0o700
    assert {mode(path) for path in store.path.iterdir()} == {0o600}
    store.path.chmod(0o755)
    Store(store.path)
    assert mode(store.path) == 0o700


@pytest.mark.parametrize("permissions", [0o720, 0o702, 0o777, 0o1777, None])
def test_a_folder_of_others_or_that_they_can_write_to_is_refused(store, permissions):
    owner, found = os.geteuid(), permissions or 0o700
    if permissions is None:
        if owner:
            pytest.skip("only root gives a folder to another user")
        owner = OTHER_USER
        os.chown(store.path, owner, -1)
    store.path.chmod(found)
    said = f"artefact folder {store.path} has owner {owner} and mode {stat.filemode(0o040000 | found)}: "
    with pytest.raises(ToolchainError, match=f"^{re.escape(said)}.*user {os.geteuid()}"):
        Store(store.path)
    assert mode(store.path) == found  # left for the user to look at


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to("compiled"), os.mkfifo])
def test_what_is_no_folder_is_refused(store, make):
    path = store.path.with_name("other")
    make(path)
    with pytest.raises(ToolchainError, match=f"artefact folder {path} has owner"):
        Store(path)


def linked(target):
    return lambda path: (path.unlink(), path.symlink_to(target))


@pytest.mark.parametrize(
    "change",
    [
        *((lambda path, bits=bits: path.chmod(bits)) for bits in (0o620, 0o602, 0o666)),
        pytest.param(lambda path: os.chown(path, OTHER_USER, -1), marks=needs_root),
        lambda path: (path.unlink(), os.mkfifo(path)),
        *map(linked, ("nowhere", f"{A}.graph", "/dev/zero", ".", "../outside", "../damaged")),
    ],
    ids=range(11),
)
def test_what_is_no_file_of_the_users_own_is_not_loaded_and_replaced(store, tmp_path, whole, change):
    """A link is not followed, to a whole file of this very name neither; what it leads to stays."""
    outside = {tmp_path / "outside": whole, tmp_path / "damaged": b"no artefact"}
    for path, data in outside.items():
        path.write_bytes(data)
    change(store.path_of(A))
    assert contents(store, A) == []
    assert keep(store, A, content=b"again") is None
    assert contents(store, A) == [b"again"]
    assert all(path.read_bytes() == data for path, data in outside.items())


# At once, and in the middle


def test_a_write_that_fails_leaves_nothing(store):
    def fail(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    assert store.keep([A, C], fail) == f"{store.path}: No space left on device"
    assert len(list(store.path.iterdir())) == 2
    assert contents(store, A, B, C) == [CONTENT]


def test_two_writers_leave_one_whole_file_under_each_name(store):
    written = [letter * 100_000 for letter in (b"u", b"v", b"w", b"x")]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            list(pool.map(lambda content: keep(store, A, B, content=content), written))
            for name in (A, B):
                assert contents(store, name)[0] in written
    assert len(list(store.path.iterdir())) == 2


STORE = """
import signal, sys
from pathlib import Path
from paged_kv.runtime.store import Store
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests were started in the background
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    store.keep(["a" * 32, "b" * 32], lambda path: path.write_bytes(b"from a child" * 100_000))
"""


def end(child, number):
    """From some four hundred interrupts one arrives where Python itself drops it (in a destructor): then another."""
    for _ in range(10):
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
            return
    child.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_in_the_middle_leaves_whole_files(store, number):
    """At any moment: each name is one of the two files, and nothing that was begun is ever found."""
    choose = random.Random(number)
    for _ in range(8):
        command = [sys.executable, "-c", STORE, str(store.path)]
        with limited(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) as child:
            child.stdout.readline()
            time.sleep(choose.uniform(0, 0.03))
            end(child, number)
        assert child.returncode in (-number, 1)
        found = contents(store, A) + contents(store, B)
        assert len(found) == 2
        assert set(found) <= {CONTENT, b"from a child" * 100_000}
    assert keep(store, A, B) is None
    assert contents(store, A, B) == [CONTENT]
