"""The folder in which this package keeps its own files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paged_kv.errors import ToolchainError

NO_CACHE = "no cache folder ({}): set XDG_CACHE_HOME to a folder that can be written"


def cache_path() -> Path:
    """The user's cache folder of this package, whether it is there or not: `$XDG_CACHE_HOME/paged-kv` or the system's.

    Raises:
        ToolchainError: the user has no home folder.
    """
    try:
        return _caches() / "paged-kv"
    except RuntimeError as error:
        raise ToolchainError(NO_CACHE.format(error)) from error


def cache_folder() -> Path:
    """The same folder, made where it is missing.

    Raises:
        ToolchainError: it cannot be made or written.
    """
    folder = cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolchainError(NO_CACHE.format(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ToolchainError(
            f"cache folder {folder} cannot be written: set XDG_CACHE_HOME to a folder that can be written"
        )
    return folder


def _caches() -> Path:
    """The folder in which programs keep caches on this system."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():  # the XDG specification ignores relative paths
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"
