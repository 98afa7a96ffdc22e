"""One application for most tests of this folder; it runs in this process, on the demo's model."""

from collections.abc import Iterator

import pytest

from paged_kv.engine.demo_model import FOLDER
from support.numpy_llama import NumpyLlama
from support.served import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served(max_step_tokens=128) as started:
        yield started


@pytest.fixture(scope="session")
def model() -> NumpyLlama:
    return NumpyLlama(FOLDER)
