"""A damaged artefact never reaches a reader of code: it is removed, and nothing but names of ours is."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from paged_kv.runtime import artefact_folder
from paged_kv.runtime.artefact_folder import ArtefactFolder
from paged_kv.runtime.seal import sealed_content
from support.limits import limited

A, B, C = "a" * 32, "b" * 32, "0123456789abcdef" * 2
CONTENT = bytes(random.Random(0).randbytes(5000))


@pytest.fixture
def folder(tmp_path):
    folder = ArtefactFolder(tmp_path / "compiled")
    folder.store([A, B], lambda path: path.write_bytes(CONTENT))
    return folder


@pytest.fixture
def whole(folder):
    return (folder.path / f"{A}.graph").read_bytes()


def contents(folder, *digests):
    return [artefact.content for artefact in folder.find(digests)]


def put(folder, data, digest=A):
    """Replaces one name; the other keeps the whole file."""
    (folder.path / f"{digest}.graph").unlink(missing_ok=True)
    (folder.path / f"{digest}.graph").write_bytes(data)


def assert_removed(folder):
    """It is not found, is gone, and the other name's file is as it was."""
    assert contents(folder, A) == []
    assert not os.path.lexists(folder.path / f"{A}.graph")
    assert contents(folder, A, B) == [CONTENT]


def test_content_is_what_was_stored_without_the_seal(folder, whole):
    assert contents(folder, A, B) == [CONTENT]
    assert whole.startswith(CONTENT)


def test_every_flipped_byte_is_found(folder, whole):
    for at in [*range(0, len(CONTENT), 97), *range(len(CONTENT), len(whole))]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x20
        put(folder, damaged)
        assert_removed(folder)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 49, 4999, 5000, 5064, -57, -49, -48, -1])
def test_a_file_that_is_cut_short_is_found(folder, whole, length):
    put(folder, whole[:length])
    assert_removed(folder)
    put(folder, whole[-length or len(whole) :])
    assert_removed(folder)


@pytest.mark.parametrize("more", [b"\0", b"PKV-SEAL", bytes(56)])
def test_a_file_that_is_too_long_is_found(folder, whole, more):
    for data in (whole + more, more + whole):
        put(folder, data)
        assert_removed(folder)


@pytest.mark.parametrize("data", [b"", bytes(5000), bytes(56) + b"PKV-SEAL", b"\xff" * 5000, CONTENT])
def test_what_has_no_seal_is_found(folder, data):
    put(folder, data)
    assert_removed(folder)


def test_a_whole_file_under_another_name_is_found(folder, whole):
    """It is not the graph that this name stands for."""
    put(folder, whole, C)
    assert contents(folder, C) == []
    assert not (folder.path / f"{C}.graph").exists()
    os.link(folder.path / f"{A}.graph", folder.path / f"{C}.graph")
    assert contents(folder, A, C) == [CONTENT]
    assert not (folder.path / f"{C}.graph").exists()


def test_a_file_of_absurd_size_is_not_read(folder, whole, monkeypatch):
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

    counted = lambda number, mode, closefd: io.BufferedReader(Counted(number, mode, closefd))  # noqa: E731
    monkeypatch.setattr(artefact_folder, "open", counted, raising=False)
    for seal in (b"", whole[5000:]):
        put(folder, b"")
        with open(folder.path / f"{A}.graph", "r+b") as file:
            file.truncate(1 << 40)
            file.seek(0, os.SEEK_END)
            file.write(seal)
        assert_removed(folder)
    assert count > 0


def test_a_damaged_file_loses_every_name_that_is_asked_for(folder):
    with open(folder.path / f"{A}.graph", "r+b") as file:
        file.write(b"damage")
    assert contents(folder, A, B) == []
    assert list(folder.path.iterdir()) == []


def test_a_link_to_a_damaged_file_removes_nothing_outside(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not an artefact")
    for make in (os.symlink, os.link):
        put(folder, b"")
        (folder.path / f"{A}.graph").unlink()
        make(outside, folder.path / f"{A}.graph")
        assert contents(folder, A) == []
        folder.store([A], lambda path: path.write_bytes(CONTENT))
        assert contents(folder, A) == [CONTENT]
        assert outside.read_bytes() == b"not an artefact"


@pytest.mark.parametrize("target", ["nowhere", "circle", "/dev/zero", "."])
def test_a_link_to_what_is_no_file_is_replaced(folder, target):
    (folder.path / f"{A}.graph").unlink()
    (folder.path / f"{A}.graph").symlink_to(f"{A}.graph" if target == "circle" else target)
    assert contents(folder, A) == []
    assert folder.store([A], lambda path: path.write_bytes(CONTENT)) is None
    assert contents(folder, A) == [CONTENT]


def test_a_folder_under_an_artefacts_name_stays(folder):
    """It is not ours: nothing is kept under that name, and nothing in it is touched."""
    (folder.path / f"{C}.graph").mkdir()
    (folder.path / f"{C}.graph" / "file").write_text("somebody's")
    assert contents(folder, C) == []
    reason = folder.store([C], lambda path: path.write_bytes(CONTENT))
    assert reason == f"{folder.path}: Is a directory"
    assert (folder.path / f"{C}.graph" / "file").read_text() == "somebody's"
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(f"{name}.graph" for name in (A, B, C))


def test_what_else_lies_in_the_folder_stays(folder):
    others = ["notes.txt", f"{A}.graph.bak", f"{A}.mef", ".hidden", "A" * 32 + ".graph"]
    for name in others:
        (folder.path / name).write_text("somebody's")
    put(folder, b"damaged")
    assert contents(folder, A, B, C) == [CONTENT]
    folder.store([A, C], lambda path: path.write_bytes(CONTENT))
    assert all((folder.path / name).read_text() == "somebody's" for name in others)


def test_a_file_that_shrinks_while_it_is_read_is_not_whole(folder, whole):
    class Shrinking:
        def __init__(self, data):
            self.data, self.at = data, 0

        def seek(self, offset, whence=os.SEEK_SET):
            self.at = offset if whence == os.SEEK_SET else len(self.data) + offset

        def read(self, count):
            part = self.data[self.at : self.at + count]
            self.at += len(part)
            if part.endswith(b"PKV-SEAL"):
                self.data = self.data[:100]
            return part

    assert sealed_content(Shrinking(whole), len(whole)) is None
    assert sealed_content(open(folder.path / f"{B}.graph", "rb"), len(whole)).content == CONTENT  # noqa: SIM115


STORE = """
import signal, sys
from pathlib import Path
from paged_kv.runtime import artefact_folder
from paged_kv.runtime.artefact_folder import ArtefactFolder
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests were started in the background
folder = ArtefactFolder(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    folder.store(["a" * 32, "b" * 32], lambda path: path.write_bytes(b"from a child" * 100_000))
"""


def end(child, number):
    """Of some four hundred interrupts one arrives where Python itself drops it (in a destructor): then another."""
    for _ in range(10):
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
            return
    child.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_in_the_middle_leaves_whole_files(folder, number):
    """At any moment: each name is one of the two files, and nothing that was begun is ever found."""
    choose = random.Random(number)
    for _ in range(8):
        command = [sys.executable, "-c", STORE, str(folder.path)]
        with limited(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) as child:
            child.stdout.readline()
            time.sleep(choose.uniform(0, 0.03))
            end(child, number)
        assert child.returncode in (-number, 1)
        found = contents(folder, A) + contents(folder, B)
        assert len(found) == 2
        assert set(found) <= {CONTENT, b"from a child" * 100_000}
    assert folder.store([A, B], lambda path: path.write_bytes(CONTENT)) is None
    assert contents(folder, A, B) == [CONTENT]
