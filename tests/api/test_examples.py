"""Each example runs as it stands and says what it should."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from max.dtype import DType

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER

EXAMPLES = Path(__file__).parents[2] / "examples"

SAYS = {
    "build_a_graph.py": """\
52 rows after [0, 0] tokens: o (52, 8, 64)
2 rows after [20, 32] tokens: o (2, 8, 64)
2 rows after [21, 33] tokens: o (2, 8, 64)
56 rows after [0, 0] tokens: o (56, 8, 64)
the same tokens in one step: largest difference <1e-5>
""",
    "flashinfer_style.py": """\
[20, 33] tokens, o (2, 8, 64) torch.bfloat16
merged from two parts: largest difference <0.02>
""",
    "pool_loop.py": """\
a: 59 tokens in 4 pages, freed
b: 34 tokens in 3 pages, freed
c: 109 tokens in 7 pages, freed
d: 83 tokens in 6 pages, freed
12 of 12 pages are free
request 'too long': num_tokens=193 needs 13 more pages, 12 of 12 are free
""",
    "speculative_decoding.py": """\
 in the earth.
And I said unto the angel of the Lord, I will not be with thee, nor with all thy testimonies.
And he said unto me, I will not see the Son of man, and the Son of man, and the Son of man.
And he said, I am
plain decoding gives the same text: True
tokens were drafted and accepted: True
""",
    "transformers_model.py": """\
generate, the same tokens: True
generate_batch, the same tokens: True
""",
    "custom_op/mean_key.py": """\
mean key of each request and head: (2, 2, 64), error <1e-5>
""",
}
"""The lines that each prints; `<bound>` stands for a number that may not be greater."""
BOUND = re.compile("<(.*?)>")


def test_every_example_is_run_and_listed():
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    elsewhere = {"train_demo_model.py", "ray_serve/offline.py"}  # eighteen minutes; tests/ray runs it
    assert found == SAYS.keys() | elsewhere
    text = (EXAMPLES.parent / "docs/examples.md").read_text()
    assert [name for name in found if f"(../examples/{name})" not in text] == []
    assert "(docs/examples.md)" in (EXAMPLES.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "name",  # MAX compiles the op of one's own in every run, for its package lies in a new folder each time
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(("build", "custom_op", "specul")) else [])
        for name in SAYS
    ],
)
def test_an_example_runs_and_is_right(name, capfd):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capfd.readouterr().out
    pattern = "".join(re.escape(part) if i % 2 == 0 else "(.*)" for i, part in enumerate(BOUND.split(SAYS[name])))
    match = re.fullmatch(pattern, printed)
    assert match, printed
    for number, bound in zip(match.groups(), BOUND.findall(SAYS[name]), strict=True):
        assert float(number) <= float(bound)


@pytest.mark.slow
def test_the_demo_model_can_be_trained(tmp_path, monkeypatch):
    """A few steps on a text of its own give a checkpoint that this package reads, of the kind that it ships."""
    text = tmp_path / "text"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 400)
    arguments = ["--out", str(tmp_path / "model"), "--text", str(text), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["train_demo_model.py", *arguments])
    runpy.run_path(str(EXAMPLES / "train_demo_model.py"), run_name="__main__")
    made, shipped = load_config(tmp_path / "model"), load_config(FOLDER)
    assert replace(made, vocab_size=shipped.vocab_size) == shipped
    assert open_source(tmp_path / "model").load(DType.bfloat16)
