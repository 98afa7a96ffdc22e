"""The README's examples run as they stand, and their answers are the oracle's."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged_kv import reference
from support.compare import assert_close, assert_lse_close
from support.limits import end_with_parent, limited

README = (Path(__file__).parents[2] / "README.md").read_text()


TRANSFORMERS, CALL, GRAPH, POOL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SERVE, ASK = re.findall(r"```sh\n\.venv/bin/(paged-kv serve.*?)\n# .*?\n(curl.*?)```", README, re.DOTALL)[0]


def test_the_graph_example_runs_and_is_right(capsys):
    names: dict = {}
    exec(GRAPH, names)
    assert capsys.readouterr().out == "(2, 8, 64) (2, 8)\n"
    pages = names["pages"]
    arrays = (names[name] for name in ("table", "requests", "lengths"))
    o, lse = reference.attention(names["q"], pages, pages, *arrays, window_left=15)
    assert_close(names["o"].to_numpy(), o, rel=1e-5, what="o")
    assert_lse_close(names["lse"].to_numpy(), lse, tol=1e-5, what="lse")
    assert np.isfinite(lse).all()


def test_the_call_example_runs_and_is_right(capsys):
    names: dict = {}
    exec(CALL, names)
    assert capsys.readouterr().out == "torch.Size([2, 8, 64])\n"
    q, pages = (names[name].double().numpy() for name in ("q", "kv_cache"))
    table, lengths = np.array([[7, 2, 0], [4, 9, 1]]), np.array([20, 33])
    o, _ = reference.attention(q, pages, pages, table, np.arange(2), lengths, window_left=15)
    result = names["wrapper"].run(names["q"], names["kv_cache"])
    assert_close(result.float().numpy(), o, rel=1e-2, what="o")


def test_the_pool_example_shares_pages(capsys):
    names: dict = {}
    exec(POOL, names)
    pages = names["pool"].pages("a")
    assert capsys.readouterr().out == f"{pages} {pages} 9\n"
    assert len(pages) == 3


def test_the_transformers_example_enables():
    names: dict = {}
    exec(TRANSFORMERS, names)
    names["paged_kv"].transformers.disable()


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl here")
def test_the_server_answers_as_the_readme_asks(tmp_path):
    program, *arguments = SERVE.split()
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=end_with_parent)
    with limited(started) as server:
        try:
            ready = server.stdout.readline()
            assert ready.startswith("paged-kv: ready on http://127.0.0.1:"), (tmp_path / "log").read_text()
            ask = ASK.replace("http://127.0.0.1:8000", ready.split()[3])
            asked = subprocess.run(["bash", "-c", ask], stdout=subprocess.PIPE, text=True, timeout=300, check=True)
        finally:
            server.terminate()
    assert json.loads(asked.stdout)["usage"]["completion_tokens"] == 24


def test_the_readme_is_two_screens():
    assert len(README.splitlines()) <= 150
