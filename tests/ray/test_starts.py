"""Engines that do not start: tried a few times, then said, in Ray's own words and the engine's."""

import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from paged_kv.engine.demo_model import FOLDER
from paged_kv.ray import application
from support.ray_load import SECONDS

WEIGHTS = "model.safetensors"


class Dying(application.NamedReplica):
    """As one that the system kills for its memory, before it has loaded."""

    def __init__(self, _: application.Arguments) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def told(name: str = "Replica"):
    return serve.status().applications["app"].deployments[name]


def wait_for(what) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, told()
        time.sleep(0.2)


def test_a_model_that_cannot_be_loaded_is_said_and_not_tried_for_ever(start, model):
    (model / WEIGHTS).unlink()
    with pytest.raises(RuntimeError, match="Failed to update the deployments"):
        start(replicas=1, model=str(model))
    for name in ("Replica", "Ingress"):
        wait_for(lambda name=name: told(name).status == "DEPLOY_FAILED")
        assert f"{model}: neither {WEIGHTS} nor" in told(name).message
    assert "failed to start 3 times in a row" in told().message
    wait_for(lambda: not told().replica_states)
    time.sleep(3)
    assert not told().replica_states


def test_an_engine_that_is_killed_while_it_loads_is_said_and_clients_get_503(start, cluster, monkeypatch):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(application, "NamedReplica", Dying)
    with pytest.raises(RuntimeError, match=r"Failed to update the deployments \['Replica'\]"):
        start(replicas=1, start_attempts=2)
    assert "failed to start 2 times in a row" in told().message
    assert "ActorDiedError" in told().message
    root = f"http://127.0.0.1:{cluster.port}"
    answers = [httpx.post(root + "/v1/completions", json={"prompt": "In", "max_tokens": 1}, timeout=SECONDS)]
    answers += [httpx.get(root + path, timeout=SECONDS) for path in ("/health", "/v1/health", "/ping", "/pool")]
    assert [(answer.status_code, "No engine runs" in answer.text) for answer in answers] == [(503, True)] * 5


def test_an_engine_that_does_not_come_back_is_unhealthy_until_it_does(start, model):
    app = start(replicas=1, model=str(model))
    (pid,) = app.status()
    hidden = (model / WEIGHTS).rename(model / "hidden")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: f"{model}: neither {WEIGHTS} nor" in told().message)
    assert told().status == "UNHEALTHY"
    assert httpx.get(app.url + "/health", timeout=SECONDS).status_code == 503
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(app.ask, "In the beginning", model=str(model), max_tokens=8)
        time.sleep(1)
        hidden.rename(model / WEIGHTS)
        assert asked.result(SECONDS).whole
    wait_for(lambda: told().status == "HEALTHY")
    assert httpx.get(app.url + "/health", timeout=SECONDS).status_code == 200


def test_an_option_that_no_engine_can_have_is_said(start):
    """As `paged-kv serve` says them."""
    with pytest.raises(RuntimeError, match="Failed to update the deployments"):
        start(replicas=1, start_attempts=1, kv_disk=__file__)
    assert f"{__file__} is no folder" in told().message
