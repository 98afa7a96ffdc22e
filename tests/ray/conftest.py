"""A cluster of two raylets on this machine, and the demo's model behind an ingress."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from paged_kv import set_num_threads
from paged_kv.engine import Engine, load
from paged_kv.engine.demo_model import FOLDER
from support.ray_load import App

KILLS = int(os.environ.get("PAGED_KV_RAY_KILLS", "1"))
ROWS = int(os.environ.get("PAGED_KV_RAY_ROWS", "96"))
"""The size that CI runs; docs/scaling.md has what came of 50 and 2000."""
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
PATIENT = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",  # 15 where nothing is said
}
"""For Ray's own processes, on a machine that does other things too."""


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine alone, whose texts are the right ones. It compiles the model's step before a replica needs it.

    One thread, as a replica has: two that wait for each other are slow where replicas have the CPUs.
    """
    set_num_threads(1)
    return load(FOLDER, num_pages=512, dtype="float32")


@pytest.fixture(scope="session")
def cluster(engine: Engine) -> Iterator[Cluster]:
    assert engine.is_idle
    # Locks of CPUs are kept from replicas of anybody else on this machine.
    temporary = tempfile.mkdtemp(prefix="pkv-", dir="/tmp")  # short: sockets lie below it
    with pytest.MonkeyPatch.context() as patch, socket.socket() as reserved:
        for name, value in (PATIENT | {"TMPDIR": temporary}).items():
            patch.setenv(name, value)
        # Ray's proxy shares the port, and nobody else is given it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        made = _raylets()
        try:
            ray.init(address=made.address, log_to_driver=False)
            made.port = reserved.getsockname()[1]
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": made.port})
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def _raylets() -> Cluster:
    """Two of them. Ray gives one some 15 s to start, whatever else the machine does: it is asked three times."""
    for last in (False, False, True):
        made = Cluster()
        try:
            made.add_node(**NODE, include_dashboard=False)
            made.add_node(**NODE | {"num_cpus": 2})  # offline: one beside the engines, for what reads
            return made
        except Exception:
            made.shutdown()
            if last:
                raise
    raise AssertionError


@pytest.fixture(scope="session")
def shared(cluster: Cluster) -> Callable[..., App]:
    """`shared(replicas=2)` is an application that tests use one after the other: the one that the last of them left, if
    its arguments are the same. It takes half a minute to start where the CPUs have other work.
    """
    left: list[tuple[dict[str, Any], App]] = []

    def application(**arguments: Any) -> App:
        if "app" not in serve.status().applications or left[-1][0] != arguments:
            serve.delete("app")
            left.append((arguments, App(cluster.port, **arguments)))
        return left[-1][1]

    return application


@pytest.fixture
def start(cluster: Cluster) -> Iterator[type[App]]:
    """`start(replicas=2)` runs the application of the demo's model; it ends with the test."""
    serve.delete("app")
    yield lambda **arguments: App(cluster.port, **arguments)
    serve.delete("app")


@pytest.fixture(scope="session")
def kills() -> int:
    """Return how many replicas are killed."""
    return KILLS


@pytest.fixture(scope="session")
def offline_rows() -> int:
    """Return how many rows are computed offline."""
    return ROWS
