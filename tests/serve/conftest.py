"""The servers of these tests: they start once a session, and are ended as a service manager ends them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.errors import ToolchainError
from paged_kv.serve import environment
from support import serving

try:
    environment.check_environment()
except ToolchainError:
    pass  # the tests of this folder skip
else:  # before several workers import MAX's server; in a process of its own, since workers would inherit what it sets
    subprocess.run(
        [sys.executable, "-c", f"from {environment.__name__} import *; import_alone()"], check=True, timeout=300
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_checkpoint(tmp_path_factory.mktemp("serve") / "demo")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[serving.Server]:
    """Prompts of more than 128 tokens prefill in pieces, and prompts that were seen are found in the prefix cache."""
    flags = (*serving.COMMON, "--max-batch-size", "8", "--max-batch-input-tokens", "128", "--enable-prefix-caching")
    with serving.serving(checkpoint, checkpoint.parent / "server.log", *flags) as started:
        yield started


@pytest.fixture(scope="module")
def strained_server(checkpoint: Path) -> Iterator[serving.Server]:
    """Whole prompts, no prefix cache, too few pages for its batch, a short queue, and steps that are made to raise."""
    flags = (*serving.COMMON, "--max-batch-size", "16", "--no-enable-prefix-caching", "--no-enable-chunked-prefill")
    flags += ("--max-queue-size", "8", "--max-pending-requests", "8")
    flags += ("--device-memory-utilization", str(serving.memory_utilization(checkpoint, serving.FEW_PAGES)))
    faulty = f"{Path(serving.__file__).parent}:faulty_architecture"
    with serving.serving(checkpoint, checkpoint.parent / "strained.log", *flags, architectures=faulty) as started:
        yield started
