"""Cache folders that cannot be written or used: graphs are loaded or compiled, and what goes wrong is said in a line.

The compiler only writes down what it was given, as in `test_artefacts.py`.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.graphs import ops
from paged_kv.runtime import artefacts, kernel_library
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import CompileKey
from support.permissions import permissions_count

IS_ROOT = os.geteuid() == 0


class Compiled:
    def __init__(self, names):
        self.names = names

    def export_mef(self, path):
        try:
            Path(path).write_text(" ".join(self.names) + " " * 10_000)
        except OSError as error:  # as MAX has it
            raise ValueError(error.strerror) from None


class Session:
    """Its `init_all` gives back what was compiled or read."""

    def __init__(self):
        self.compiles = 0

    def compile(self, module, custom_extensions):  # noqa: ARG002
        self.compiles += 1
        return Compiled(module)

    def init_all(self, compiled, weights_registry):  # noqa: ARG002
        return {name: f"model {name}" for name in compiled.names}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(artefacts, "read", lambda file: Compiled(file.read().decode().split()))
    monkeypatch.setattr(artefacts, "Module", list)
    monkeypatch.setattr(kernel_library, "subprocess_run_mojo", lambda args, **_: Path(args[-1]).write_text("kernels"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder for caches, whose permission bits count."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with permissions_count():
        yield cache
    opened(cache)


def load(*names):
    """How often something was compiled, and what was warned of."""
    session = Session()
    keys = {name: CompileKey(name, ops.__name__) for name in names or ("graph",)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of other tests, collected meanwhile
        models = load_graphs(session, keys, lambda module, missing: module.extend(missing))
    assert models == {name: f"model {name}" for name in keys}
    return session.compiles, [str(warning.message) for warning in caught]


def closed(folder):
    """Takes the right to write from a folder and all that is in it."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)


def opened(folder):
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_used_for_what_it_holds(home):
    assert load("first") == (1, [])
    closed(home)
    assert load("first") == (0, [])
    compiles, warned = load("second")
    assert compiles == 1
    assert warned == [
        f"compiled graphs are not kept ({home}/paged-kv/compiled: Permission denied): each start compiles them"
    ]
    assert load("second")[0] == 1
    assert (home / "paged-kv" / "compiled").stat().st_mode & 0o777 == 0o500  # as its owner has it
    opened(home)
    assert load("second") == (1, [])
    assert load("first", "second") == (0, [])


def test_a_damaged_file_that_cannot_be_removed_is_not_used(home):
    load("first")
    (path,) = (home / "paged-kv" / "compiled").iterdir()
    path.write_text("damaged")
    closed(home)
    assert load("first")[0] == 1
    assert path.read_text() == "damaged"
    opened(home)
    assert load("first") == (1, [])
    assert load("first") == (0, [])


@pytest.mark.parametrize("place", ["cache", "cache/paged-kv"])
def test_a_folder_that_cannot_be_made_is_no_error(home, place):
    folder = home.parent / place
    folder.mkdir(exist_ok=True)
    closed(folder)
    compiles, warned = load()
    reason = f"{home}/paged-kv/compiled: Permission denied"
    assert compiles == 1
    assert warned == [f"compiled graphs are not kept ({reason}): each start compiles them"]
    opened(folder)


def test_a_folder_that_may_not_be_entered_is_no_error(home):
    load()
    home.chmod(0)
    compiles, warned = load()
    home.chmod(0o700)
    assert (compiles, len(warned)) == (1, 1)


@pytest.mark.parametrize("cache", ["file", "file/below", "long", "circle"])
def test_a_place_that_is_none_is_a_typed_error(tmp_path, monkeypatch, cache):
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("a" * 5000 if cache == "long" else cache)))
    with pytest.raises(ToolchainError, match=r"^no cache folder \(.*\): set XDG_CACHE_HOME to a folder that") as caught:
        load()
    assert "\n" not in str(caught.value)


def test_no_home_folder_is_a_typed_error(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(ToolchainError, match=r"^no cache folder \(Could not .*\): set XDG_CACHE_HOME"):
        load()


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "device"])
@pytest.mark.parametrize("name", ["compiled", "kernels"])
def test_what_lies_in_the_way_of_the_folder_is_a_typed_error(tmp_path, monkeypatch, name, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path = tmp_path / "paged-kv" / name
    path.parent.mkdir()
    make = {"file": Path.touch, "link": lambda p: p.symlink_to(tmp_path / "elsewhere"), "pipe": os.mkfifo}
    make["device"] = lambda p: p.symlink_to("/dev/null")
    make[kind](path)
    with pytest.raises(ToolchainError, match=f"artefact folder {path} has owner"):
        load()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_keeps_nothing_and_breaks_nothing(tmp_path, monkeypatch):
    """The size of files is limited, which fails as a full disk or a quota does: in the middle of a write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load("whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 10, 10_010, 10_060):  # in the file, at its seal, within its seal
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            compiles, warned = load("whole", "new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert compiles == 1
        assert warned == [
            f"compiled graphs are not kept ({tmp_path}/paged-kv/compiled: File too large): each start compiles them"
        ]
        assert len(list((tmp_path / "paged-kv" / "compiled").iterdir())) == 1
    signal.signal(signal.SIGXFSZ, ignored)
    assert load("whole") == (0, [])
    assert load("new") == (1, [])


FULL = """
mount -t tmpfs -o size=8k none "$1" && cd "$1" && mkdir -m 700 -p paged-kv/compiled && shift && exec "$@"
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root mounts a file system")
def test_a_full_file_system(tmp_path):
    """One of 8 KB, in a mount namespace of its own."""
    namespace = ["unshare", "--mount", "bash", "-c", FULL, "-", str(tmp_path)]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=300).returncode:
        pytest.skip("no mount namespaces here")
    body = f"""
from paged_kv.runtime.artefact_folder import ArtefactFolder
from pathlib import Path
folder = ArtefactFolder(Path({str(tmp_path)!r}, "paged-kv", "compiled"))
print(folder.store(["a" * 32], lambda path: path.write_bytes(bytes(20_000))), list(folder.path.iterdir()))
print(folder.store(["a" * 32], lambda path: path.write_bytes(bytes(100))), len(folder.find(["a" * 32])))
"""
    done = subprocess.run([*namespace, sys.executable, "-c", body], capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{tmp_path}/paged-kv/compiled: No space left on device []\nNone 1\n", done.stderr


def test_kernels_that_cannot_be_kept_are_compiled_from_their_sources(home, monkeypatch):
    """The sources themselves are MAX's then; it compiles them for each graph."""
    sources = Path(tempfile.mkdtemp(dir=home))
    (sources / "ops.mojo").write_text("")
    kept = kernel_library.kernel_library(sources)
    assert kept.parent.parent == home / "paged-kv" / "kernels"
    closed(home / "paged-kv")
    assert kernel_library.kernel_library(sources) == kept
    (sources / "ops.mojo").write_text("# another")
    assert kernel_library.kernel_library(sources) == sources
    opened(home / "paged-kv")

    def full(args, **_):
        raise subprocess.CalledProcessError(1, args, stderr=b"error: cannot write: No space left on device")

    monkeypatch.setattr(kernel_library, "subprocess_run_mojo", full)
    assert kernel_library.kernel_library(sources) == sources


def test_damaged_kernels_are_compiled_again(home):
    sources = Path(tempfile.mkdtemp(dir=home))
    (sources / "ops.mojo").write_text("")
    kept = kernel_library.kernel_library(sources)
    sealed = kept.parent.with_suffix(".kernels")
    whole = {file: file.read_bytes() for file in (kept, sealed)}
    assert whole[kept] == b"kernels"  # the compiler crashes on a byte that differs, and reads no byte more
    assert whole[sealed].startswith(b"kernels")
    outside = home / "outside"
    outside.write_text("somebody's")
    for file in whole:
        for damaged in (whole[file][:-1], b"K" + whole[file][1:], whole[file] + b"\0", b"", None):
            file.unlink()
            file.symlink_to(outside) if damaged is None else file.write_bytes(damaged)
            assert kernel_library.kernel_library(sources) == kept
            assert {file: file.read_bytes() for file in whole} == whole
            assert not kept.is_symlink()
    assert outside.read_text() == "somebody's"


def test_a_damaged_file_for_the_compiler_that_cannot_be_replaced_is_not_used(home):
    sources = Path(tempfile.mkdtemp(dir=home))
    (sources / "ops.mojo").write_text("")
    kept = kernel_library.kernel_library(sources)
    kept.write_text("damaged")
    closed(home / "paged-kv")
    assert kernel_library.kernel_library(sources) == sources
    opened(home / "paged-kv")
    assert kernel_library.kernel_library(sources) == kept
