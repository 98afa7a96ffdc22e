"""What `paged-kv serve` looks for before it imports MAX's server."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from textwrap import dedent

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.serve import environment
from paged_kv.serve.environment import check_environment

PACKAGE = """
    import time
    from pathlib import Path

    library = Path(__file__).with_name("library")
    if not library.exists():  # as MAX's importer: a file that is there is whole
        with library.open("w") as file:
            file.write("half")
            file.flush()
            time.sleep(2)
            file.write(" and half")
    if library.read_text() != "half and half":
        raise ImportError(f"{library}: file too short")
"""
"""Compiles itself where it is first imported, and writes in place."""


def test_an_environment_with_all_that_max_asks_for(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ["pytest>=1; extra == 'serve'", "nosuch; extra == 'benchmark'"])
    check_environment()
    monkeypatch.setattr(metadata, "requires", lambda _: [f"n{i}; extra == 'serve'" for i in range(5)])
    with pytest.raises(ToolchainError, match="n0 is missing, n1 is missing, n2 is missing and 2 more; make"):
        check_environment()


def test_servers_that_start_at_once_in_a_new_environment_load_a_whole_library(tmp_path):
    (tmp_path / "compiles_itself").mkdir()
    (tmp_path / "compiles_itself" / "__init__.py").write_text(dedent(PACKAGE))
    start = [sys.executable, "-c", "from paged_kv.serve.environment import *; import_alone('compiles_itself')"]
    own = {"PYTHONPATH": str(tmp_path)}
    with ThreadPoolExecutor(3) as servers:
        ended = servers.map(lambda _: subprocess.run(start, env=own, capture_output=True, timeout=60), range(3))
        assert [server.stderr for server in ended] == [b""] * 3


def test_a_library_that_was_never_written_whole_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(dedent(PACKAGE))
    (tmp_path / "broken" / "library").write_text("half")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolchainError, match=r"broken/library: file too short; where it names a file, remove"):
        environment.import_alone("broken")


def test_another_max_may_have_no_such_library():
    environment.import_alone("no_such_package")
