"""The package's public face: every name is there, from its own module, and importing the package costs nothing."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paged_kv

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", paged_kv.__all__)
def test_every_public_name_is_there(name):
    value = getattr(paged_kv, name)
    assert value.__module__.startswith("paged_kv.")
    assert name in dir(paged_kv)


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    names = {}
    for package in ("", ".engine", ".errors", ".graphs.ops", ".pool", ".serve.chat", ".torch", ".transformers"):
        module = import_module(f"paged_kv{package}")
        names |= {name: getattr(getattr(module, name), "__module__", None) for name in getattr(module, "__all__", ())}
    ours = {name: home for name, home in names.items() if home and home.startswith("paged_kv")}
    assert {name: home for name, home in ours.items() if home not in documented} == {}


def test_the_names_are_the_modules_own():
    assert sorted(paged_kv._HOME) == sorted(paged_kv.__all__)
    for module in ("cache", "cascade", "decode", "page", "pool"):
        assert getattr(paged_kv, module).__name__ == f"paged_kv.{module}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paged_kv.nothing  # noqa: B018


@pytest.mark.parametrize("code", ["import paged_kv; paged_kv.PagePool(4, 16)", "import paged_kv.cli"])
def test_the_pool_and_the_command_line_need_neither_max_nor_the_benchmark(code):
    check = "assert not [name for name in sys.modules if name.split('.')[0] == 'max' or 'paged_kv.bench' in name]"
    subprocess.run([sys.executable, "-c", f"{code}\nimport sys\n{check}"], timeout=300, check=True)
