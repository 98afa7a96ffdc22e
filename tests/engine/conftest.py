"""Fixtures of the tests of the command: the demo's checkpoint, a copy of it to damage, another configuration."""

import shutil

import pytest

from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.runtime.cache_folder import cache_folder


@pytest.fixture(scope="session")
def folder():
    """A checkpoint of noise: whatever runs first compiles it for all."""
    return write_demo_checkpoint(cache_folder() / "demo")


@pytest.fixture
def copy(folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(folder, tmp_path / "model")
