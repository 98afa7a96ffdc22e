"""The README's example runs as it stands, and its answer is the oracle's."""

import re
from pathlib import Path

import numpy as np

from compare import assert_close, assert_lse_close
from paged_kv import reference

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_graph_example_runs_and_is_right(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert capsys.readouterr().out == "(2, 8, 64) (2, 8)\n"
    pages = names["pages"]
    arrays = (names[name] for name in ("table", "requests", "lengths"))
    o, lse = reference.attention(names["q"], pages, pages, *arrays, window_left=15)
    assert_close(names["o"].to_numpy(), o, rel=1e-5, what="o")
    assert_lse_close(names["lse"].to_numpy(), lse, tol=1e-5, what="lse")
    assert np.isfinite(lse).all()
