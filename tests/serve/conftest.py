"""One application for most tests of this folder; it runs in this process, on the demo's model."""

from collections.abc import Iterator

import pytest

from paged_kv.engine.demo_model import FOLDER
from support.numpy_llama import NumpyLlama
from support.served import Served, served
from support.tool_chats import HERMES


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served(max_step_tokens=128) as started:
        yield started


@pytest.fixture(scope="session")
def tools() -> Iterator[Served]:
    """A server whose model is asked to call tools as Hermes models do."""
    with served(template=HERMES, length=2048, num_pages=1024) as started:
        yield started


@pytest.fixture(scope="session")
def model() -> NumpyLlama:
    return NumpyLlama(FOLDER)
