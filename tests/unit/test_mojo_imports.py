"""The check of the Mojo folders' imports refuses what it should: each rule is broken once, in a copy."""

import shutil
from pathlib import Path

import pytest

from support.ci_modules import ci_module

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """The check, over a copy of mojo_ops."""
    module = ci_module("check_mojo_imports")
    monkeypatch.setattr(module, "ROOT", tmp_path / "mojo_ops")
    shutil.copytree(ROOT / "mojo_ops", module.ROOT)
    return module


def test_the_imports_are_in_order(checked, capsys):
    assert checked.main() == 0
    assert "no rule broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("linear/vectors.mojo", "from ..transfer.append import x", "linear may not know transfer"),
        ("cache/strides.mojo", "from ..attention.softmax import x", "cache may not know attention"),
        ("isa/convert.mojo", "from .. import ops", "isa may not know ops"),
        ("attention/cpu/plan.mojo", "from ..gpu.dispatch import x", "attention/cpu may not know attention/gpu"),
        ("attention/gpu/dispatch.mojo", "from ..cpu import plan", "attention/gpu may not know attention/cpu"),
        ("transfer/append.mojo", "from .gpu.append import x", "transfer/append may not know transfer/gpu"),
        ("attention/softmax.mojo", "from .cpu.kv_tile import (\n    x,\n)", "circle: "),
        ("attention/softmax.mojo", "from .nothing import x", "no file mojo_ops/attention/nothing.mojo"),
        ("isa/amx.mojo", "from mojo_ops.cache.strides import x", "write a relative import"),
        ("new/folder.mojo", "", "the folder new has no line"),
    ],
)
def test_a_broken_rule_is_told(checked, capsys, file, line, told):
    path = checked.ROOT / file
    path.parent.mkdir(exist_ok=True)
    text = path.read_text() if path.exists() else ""
    path.write_text(f"{text}\n{line}\n")
    assert checked.main() == 1
    assert told in capsys.readouterr().out
