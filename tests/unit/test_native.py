"""Libraries of kernels on disk: built once, with a compiler that writes a line and a loader that reads it."""

import stat
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime import native as module
from paged_kv.runtime.native import native_library
from support.permissions import permissions_count


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_LIBRARIES", {})
    monkeypatch.setattr(module, "NativeLibrary", lambda path: Path(path).read_text())
    monkeypatch.setattr(module, "kernel_library", lambda sources: sources)
    return tmp_path / "cache" / "paged-kv" / "native"


@pytest.fixture
def compiler(monkeypatch):
    """What it was given, and how it ends."""
    seen = SimpleNamespace(given=[], errors="")

    def build(arguments, **_):
        seen.given.append(arguments)
        if not seen.errors:
            Path(arguments[-1]).write_text(" ".join(option for option in arguments if "=" in option))
        return SimpleNamespace(returncode=int(bool(seen.errors)), stderr=seen.errors)

    monkeypatch.setattr(module, "subprocess_run_mojo", build)
    return seen


def again(monkeypatch):
    """What another process gets."""
    monkeypatch.setattr(module, "_LIBRARIES", {})
    return native_library("bfloat16", "int8")


def test_a_pair_of_dtypes_is_built_once(compiler, folder, monkeypatch):
    found = native_library("bfloat16", "int8")
    assert "ROWS=bfloat16 CACHE=int8" in found
    assert again(monkeypatch) == found
    assert len(compiler.given) == 1
    assert "ROWS=float32 CACHE=float32" in native_library("float32", "float32")
    assert len(compiler.given) == 2
    assert all("PAGED_KV_OPENMP" in given for given in compiler.given)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "loaded").stat().st_mode) == 0o700


def test_a_file_that_is_damaged_or_not_the_users_own_is_not_loaded(compiler, folder, monkeypatch):
    found = native_library("bfloat16", "int8")
    (loaded,) = (folder / "loaded").glob("*.so")
    loaded.write_text("damaged")
    assert again(monkeypatch) == found
    loaded.unlink()
    loaded.symlink_to(__file__)
    assert again(monkeypatch) == found
    assert not loaded.is_symlink()
    loaded.chmod(0o666)
    assert again(monkeypatch) == found
    assert stat.S_IMODE(loaded.stat().st_mode) == 0o600
    (kept,) = folder.glob("*.library")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert again(monkeypatch) == found
    assert len(compiler.given) == 2
    (folder / "loaded").chmod(0o777)
    with pytest.raises(ToolchainError, match="no other user can write to"):
        again(monkeypatch)


@pytest.mark.parametrize("errors", ["error: unable to find suitable c compiler for linking", "ld: error: no -lm"])
def test_where_none_can_be_built_a_warning_says_so_once(errors, compiler):
    compiler.errors = errors
    reason = errors.partition("error: ")[2]
    with pytest.warns(RuntimeWarning, match=f"bfloat16 over int8 .*{reason}.*: calls run on MAX's threads"):
        assert native_library("bfloat16", "int8") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_library("bfloat16", "int8") is None


@pytest.mark.usefixtures("compiler")
def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    found = native_library("bfloat16", "int8")
    with permissions_count():
        for path in (folder / "loaded", folder):
            path.chmod(0o500)
        assert again(monkeypatch) == found
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert native_library("float32", "float32") is None


@pytest.mark.usefixtures("compiler")
def test_a_process_without_openmp_goes_by_max(monkeypatch):
    def load(_):
        raise OSError("undefined symbol: GOMP_parallel")

    monkeypatch.setattr(module, "NativeLibrary", load)
    with pytest.warns(RuntimeWarning, match="undefined symbol: GOMP_parallel"):
        assert native_library("bfloat16", "int8") is None


def test_sources_that_do_not_compile_are_an_error_each_time(compiler):
    compiler.errors = "native.mojo:12:1: error: no such name"
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"does not compile: native.mojo:12:1: error: no such name"):
            native_library("bfloat16", "int8")


@pytest.mark.usefixtures("compiler")
def test_a_source_that_is_edited_meanwhile_is_an_error(monkeypatch):
    digests = iter("ab")
    monkeypatch.setattr(module, "digests_of", lambda *_: {"": next(digests) * 32})
    with pytest.raises(ToolchainError, match="edited while it was compiled"):
        native_library("bfloat16", "int8")


def test_what_a_kernel_says_is_raised(monkeypatch):
    said = module.ctypes.create_string_buffer(b"row_lengths: row 0 has length -3")
    freed = []
    monkeypatch.setattr(module, "_FREE", freed.append)
    with pytest.raises(ContractError, match="row 0 has length -3"):
        module._check(module.ctypes.addressof(said))
    assert freed == [module.ctypes.addressof(said)]
    module._check(None)
