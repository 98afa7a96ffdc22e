"""The cache folder: where it is, and what is said when it cannot be had."""

import os
from pathlib import Path

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.store import user_store


def test_xdg_cache_home_is_followed_and_the_folder_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert cache_folder() == tmp_path / "not" / "yet" / "paged-kv"
    assert cache_folder().is_dir()


@pytest.mark.parametrize("value", [None, "", "relative/path"])
@pytest.mark.parametrize(
    ("platform", "place"),
    [("linux", ".cache/paged-kv"), ("darwin", "Library/Caches/paged-kv"), ("win32", "AppData/Local/paged-kv")],
)
def test_each_system_has_its_own_place(tmp_path, monkeypatch, value, platform, place):
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / place


@pytest.mark.parametrize("cache", ["file", "file/below", "long", "circle", None])
def test_a_place_that_is_none_is_one_clear_line(tmp_path, monkeypatch, cache):
    def none():
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("a" * 5000 if cache == "long" else cache or "")))
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", none)
    for call in (cache_folder, user_store):
        with pytest.raises(
            ToolchainError, match=r"^no cache folder \(.*\): set XDG_CACHE_HOME to a folder that"
        ) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as which some CIs run, may write anywhere
    with pytest.raises(ToolchainError, match=f"cache folder {tmp_path}/paged-kv cannot be written"):
        cache_folder()
