"""A cluster of two raylets on this machine, and the demo's model behind an ingress."""

import os
import socket
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from paged_kv.engine import Engine, load
from paged_kv.engine.demo_model import FOLDER
from support.ray_load import App

KILLS = int(os.environ.get("PAGED_KV_RAY_KILLS", "4"))
ROWS = int(os.environ.get("PAGED_KV_RAY_ROWS", "320"))
"""What CI does; docs/scaling.md has what came of 50 and 2000."""
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine alone, whose texts are the right ones. It compiles the model's step before a replica needs it."""
    return load(FOLDER, num_pages=512, dtype="float32")


@pytest.fixture(scope="session")
def cluster(engine: Engine) -> Iterator[Cluster]:
    assert engine.is_idle
    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112 (Ray's spelling)
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE | {"num_cpus": 2})  # offline: one beside the engines, for what reads
        ray.init(address=made.address, log_to_driver=False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        made.port = port
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def start(cluster: Cluster) -> Iterator[type[App]]:
    """`start(replicas=2)` runs the application of the demo's model; it ends with the test."""
    yield lambda **arguments: App(cluster.port, **arguments)
    serve.delete("app")


@pytest.fixture(scope="session")
def kills() -> int:
    """How many replicas are killed."""
    return KILLS


@pytest.fixture(scope="session")
def offline_rows() -> int:
    """How many rows are computed offline."""
    return ROWS
