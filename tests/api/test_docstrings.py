"""Every example of a docstring is right."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python/paged_kv"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_right(name: str) -> None:
    found = doctest.testmod(import_module(name), report=True)
    assert found.attempted
    assert not found.failed
