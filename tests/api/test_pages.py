"""Every block of code that the pages show runs as it stands, but for those that a page marks; README's are also right.

A page's blocks of Python run in order, in one namespace, and its blocks of shell in the same folder: there DIR is the
demo's model, and `.venv` the environment of the tests.
"""

import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paged_kv import reference
from paged_kv.engine.demo_model import FOLDER
from support.compare import assert_close, assert_lse_close
from support.limits import end_with_parent, limited
from support.pages import PAGES, ROOT, Block, blocks, name

NOT_RUN = {
    "compiles for minutes": 1,
    "it aborts the process": 1,
    "it is a run of the tests": 1,
    "its own test runs it": 1,
    "measures for hours": 1,
    "needs MAX Serve; tests/max_serve runs it": 1,
    "needs Ray; tests/ray runs examples/ray_serve": 2,
    "needs a GPU": 3,
    "needs a coding agent": 2,
    "needs a cross compiler and QEMU": 1,
    "needs an adapter": 1,
    "needs the server": 2,
    "needs vLLM; tests/vllm runs it": 1,
    "serves until it is stopped": 1,
}
"""Reasons of the blocks that no test of this folder runs, and how many blocks have each."""
ANOTHER_TERMINAL = re.compile(r"^# .*another terminal.*\n", re.MULTILINE)
"""The commands before it start a server, and those after it ask it."""
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
"""The words by which a page says that a call prints, up to a colon."""


def is_run(block: Block) -> bool:
    return block.reason is None and "pip install" not in block.code


def pages(language: str) -> list[Path]:
    return [page for page in PAGES if any(map(is_run, blocks(page, language)))]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "DIR").symlink_to(FOLDER)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for folder in ("benchmarks", "examples", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)


def run_python(page: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    """Runs a page's blocks of Python, and holds what they print against what the page says; their names."""
    names: dict = {"__name__": "page"}
    for block in filter(is_run, blocks(page, "python")):
        exec(compile(block.code, block.page, "exec"), names)
        printed = capsys.readouterr().out
        for said in PRINTED.findall(block.code):
            assert said.partition(": ")[0] in printed.splitlines(), printed
    return names


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("python"), ids=name)
def test_the_python_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        names = run_python(page, capsys)
        if name(page) in CHECKS:
            CHECKS[name(page)](names)
    finally:
        if "paged_kv.transformers" in sys.modules:
            sys.modules["paged_kv.transformers"].disable()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("sh"), ids=name)
def test_the_commands_of_a_page_run(page: Path) -> None:
    for block in filter(is_run, blocks(page, "sh")):
        server, _, ask = ANOTHER_TERMINAL.sub("\0", block.code).rpartition("\0")
        with answering(server) as url:
            shell = ["bash", "-euo", "pipefail", "-c", ask.replace("http://127.0.0.1:8000", url)]
            done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
        assert done.returncode == 0, block.code
        assert not server or '"finish_reason"' in done.stdout, done.stdout


@contextmanager
def answering(command: str):
    """A server that a block starts, on a port of its own; nothing without a command."""
    if not command:
        yield ""
        return
    with Path("log").open("wb") as log:
        program = [*command.split(), "--port", "0"]
        started = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=end_with_parent)
    with limited(started) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            assert ready.startswith("paged-kv: ready on http://127.0.0.1:"), Path("log").read_text()
            yield ready.split()[3]
        finally:
            server.terminate()


def readme_is_right(names: dict) -> None:
    """The graph and FlashInfer's call compute what the oracle does; two requests share a pool's pages."""
    graph_pages = names["pages"]
    o, lse = reference.attention(
        names["q"], graph_pages, graph_pages, names["table"], names["requests"], names["lengths"], window_left=15
    )
    assert_close(names["o"].to_numpy(), o, rel=1e-5, what="o")
    assert_lse_close(names["lse"].to_numpy(), lse, tol=1e-5, what="lse")
    assert np.isfinite(lse).all()
    q, cache = names["torch"].randn(2, 8, 64).bfloat16(), names["kv_cache"]
    o, _ = reference.attention(
        *(x.double().numpy() for x in (q, cache, cache)), names["table"], np.arange(2), names["lengths"], window_left=15
    )
    assert_close(names["wrapper"].run(q, cache).float().numpy(), o, rel=1e-2, what="o")
    assert names["pool"].pages("a") == names["pool"].pages("b")
    assert len(names["pool"].pages("a")) == 3


CHECKS = {"README.md": readme_is_right}


def test_what_is_not_run_is_known() -> None:
    found = [block for page in PAGES for language in ("python", "sh") for block in blocks(page, language)]
    assert Counter(block.reason for block in found if block.reason) == NOT_RUN


def test_the_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
