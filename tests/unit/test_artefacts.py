"""Artefacts that are compiled, read from disk and kept, with a compiler that only writes down what it was given."""

import resource
import signal
import threading
import warnings

import pytest
from max.engine.api import _COMPILATION_LOCK

from paged_kv.errors import ToolchainError
from paged_kv.runtime import artefacts
from paged_kv.runtime.artefacts import compile_ahead, load_graphs
from support.fake_compiler import NAMES, Session, build, compiles, edit_while_compiling, install, keys
from support.permissions import permissions_count


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache's, which is made by the first load."""
    return install(monkeypatch, tmp_path / "caches")


def load(*names, facts=""):
    """The lists of names that had to be compiled."""

    def run(session):
        models = load_graphs(session, keys(names, facts), build)
        assert models == {name: f"model {name}" for name in names}

    return compiles(run)


def load_warned(*names):
    """Count how often something was compiled, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of other tests, collected meanwhile
        return len(load(*names)), [str(warning.message) for warning in caught]


# The cache folder


def test_what_is_missing_is_compiled_together_and_once(folder):
    assert load("first", "second") == [["first", "second"]]
    assert load("second") == []
    assert load("second", "third", "first") == [["third"]]
    assert load(*NAMES) == []
    assert len(list(folder.iterdir())) == 3


def test_a_graph_whose_key_changed_is_not_taken_from_the_file_of_the_others(folder):
    """All three lie in one file; the name of one that is up to date does not make the others valid."""
    load(*NAMES)
    changed = keys(["first"]) | keys(["second", "third"], " changed")
    assert compiles(lambda session: load_graphs(session, changed, build)) == [["second", "third"]]
    assert len(list(folder.iterdir())) == 5


def test_a_graph_may_come_back_under_the_name_of_an_equal_one(folder, monkeypatch):
    """MAX's own cache does not look at names: a graph that equals one it has compiled before gets that one's."""
    monkeypatch.setattr(Session, "init_all", lambda *_, **__: {"of an older one": "model first"})
    assert load("first") == [["first"]]
    assert load("first") == []
    assert len(list(folder.iterdir())) == 1


def test_what_is_not_whole_or_not_read_by_max_is_compiled_again(folder):
    for damage in ("cut sho", "unreadable"):
        load("first", "second")
        for path in folder.iterdir():
            path.write_text(damage)
            if damage == "unreadable":
                artefacts.user_store().keep([path.stem], lambda file: file.write_text("unreadable"))
        assert load("first", "second") == [["first", "second"]]
        assert load("first", "second") == []


def test_what_is_compiled_from_sources_that_were_edited_meanwhile_is_not_kept(folder, monkeypatch):
    load("second")
    edit_while_compiling(monkeypatch)
    assert load("first") == [["first"]]
    assert len(list(folder.iterdir())) == 1


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_compile_has_ended_where_max_has_been_told_so(monkeypatch, fails):
    """A thread of MAX's pool releases its lock in Python, which a process that has ended would not survive."""
    compile_names, told = Session.compile, threading.Event()

    def tell():
        told.set()
        _COMPILATION_LOCK.release()

    def compile_and_tell_later(*args, **options):
        _COMPILATION_LOCK.acquire()
        threading.Timer(0.2, tell).start()
        if fails:
            raise RuntimeError("error: no")
        return compile_names(*args, **options)

    monkeypatch.setattr(Session, "compile", compile_and_tell_later)
    if fails:
        with pytest.raises(ToolchainError):
            load("first")
    else:
        load("first")
    assert told.is_set()


# A cache folder that cannot be written or used


@pytest.fixture
def home(tmp_path):
    """The folder for caches, whose permission bits count."""
    caches = tmp_path / "caches"
    caches.mkdir()
    with permissions_count():
        yield caches
    opened(caches)


def closed(folder):
    """Takes the right to write from a folder and all that is in it."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)


def opened(folder):
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_used_for_what_it_holds(home, folder):
    """A damaged file in it, which cannot be removed, is not."""
    load("first")
    load("third")
    damaged = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    damaged.write_text("damaged")
    closed(home)
    assert load_warned("first") == (0, [])
    not_kept = f"compiled graphs are not kept ({folder}: Permission denied): each start compiles them"
    for name in ("second", "third", "second"):
        assert load_warned(name) == (1, [not_kept])
    assert folder.stat().st_mode & 0o777 == 0o500  # as its owner has it
    opened(home)
    assert load_warned("second", "third") == (1, [])
    assert load_warned(*NAMES) == (0, [])


@pytest.mark.parametrize(("place", "mode"), [(".", 0o500), ("paged-kv", 0o500), (".", 0)])
def test_a_folder_that_cannot_be_made_or_entered_is_no_error(home, folder, place, mode):
    (home / place).mkdir(exist_ok=True)
    (home / place).chmod(mode)
    not_kept = f"compiled graphs are not kept ({folder}: Permission denied): each start compiles them"
    assert load_warned("first") == (1, [not_kept])
    home.chmod(0o700)


def test_a_full_disk_keeps_nothing_and_breaks_nothing(folder):
    """The size of files is limited, which fails as a full disk or a quota does: in the middle of a write."""
    load("first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 10, 10_006, 10_060):  # in the file, at its seal, within its seal
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            compiled, warned = load_warned("first", "second")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert compiled == 1
        assert warned == [f"compiled graphs are not kept ({folder}: File too large): each start compiles them"]
        assert len(list(folder.iterdir())) == 1
    signal.signal(signal.SIGXFSZ, ignored)
    assert load("first", "second") == [["second"]]


# `paged-kv compile`


def test_what_was_compiled_ahead_is_found_without_a_compile():
    assert compiles(lambda session: compile_ahead(session, keys(["first"]), build)) == [["first"]]
    assert compiles(lambda session: compile_ahead(session, keys(["first", "second"]), build)) == [["second"]]
    assert load("first", "second") == []
    assert load("first", facts=" of another size") == [["first"]]


def test_a_cache_folder_that_cannot_be_written_and_sources_that_are_edited_are_refused_ahead(folder, monkeypatch):
    load("first")
    folder.chmod(0o555)
    with permissions_count(), pytest.raises(ToolchainError, match=r"cannot be kept: .*Permission denied"):
        compile_ahead(Session(), keys(["second"]), build)
    folder.chmod(0o700)
    edit_while_compiling(monkeypatch)
    with pytest.raises(ToolchainError, match="edited while"):
        compile_ahead(Session(), keys(["second"]), build)
    assert len(list(folder.iterdir())) == 1
