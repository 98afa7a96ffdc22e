"""`paged-kv serve` says when it is ready; where it cannot say so, it leaves."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType

import pytest

from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.serve import launch, memory
from paged_kv.serve.launch import Announcement, Serving

GIB = 1 << 30


class Full(io.StringIO):
    """A stream on a full device."""

    def flush(self):
        raise OSError(28, "No space left on device")


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Serves with a function in place of MAX's server, which answers at once."""
    monkeypatch.setattr(launch, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "_memory_of_max", lambda: 10 * GIB)
    monkeypatch.setattr(launch, "check_environment", lambda: None)
    monkeypatch.setattr(launch, "import_alone", lambda: None)
    monkeypatch.setattr(launch.urllib.request, "urlopen", lambda *_, **__: contextlib.nullcontext())
    of_max = {name for name in os.environ if name.startswith("MAX_SERVE")}
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ.keys() - of_max})
    allocator, pipelines = ModuleType("allocator"), ModuleType("pipelines")
    allocator.reexec_with_jemalloc = lambda: None
    monkeypatch.setitem(sys.modules, "max._entrypoints.allocator", allocator)
    monkeypatch.setitem(sys.modules, "max._entrypoints.pipelines", pipelines)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    connections = ModuleType("connections")
    connections.guard = lambda _, sockets: [opened.close() for opened in sockets]
    monkeypatch.setitem(sys.modules, "paged_kv.serve.connections", connections)
    request = Serving(write_demo_checkpoint(tmp_path / "demo"), "127.0.0.1", 0, "bfloat16", 16)

    def serve(server, **options):
        pipelines.main = lambda **_: server()
        launch.serve(replace(request, **options))

    yield serve
    signal.signal(signal.SIGINT, interrupt)


def wait():
    """Passes an interrupt on."""
    time.sleep(300)
    raise AssertionError("the server was not told to stop")


def wait_and_return():
    """Ends by itself when it is interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        wait()


@pytest.mark.parametrize("server", [wait, wait_and_return])
def test_a_server_that_cannot_say_that_it_is_ready_leaves(serve, server, monkeypatch):
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="No space left on device") as raised:
        serve(server)
    assert not isinstance(raised.value.__context__, AssertionError)  # of `wait`


@pytest.mark.parametrize("metrics", [False, True])
def test_a_server_that_can_goes_on(serve, monkeypatch, metrics):
    """Metrics, which slow a step down, are for those who ask for them."""
    said = threading.Event()

    class Stdout(io.StringIO):
        def flush(self):
            if self.getvalue():
                said.set()

    stdout, ended = Stdout(), []
    monkeypatch.setattr("sys.stdout", stdout)

    def server():
        assert said.wait(300)
        time.sleep(0.1)  # nobody tells it to stop
        ended.append(True)

    serve(server, metrics=metrics)
    assert ended
    assert os.environ["MAX_SERVE_METRIC_RECORDING_METHOD"] == ("PROCESS" if metrics else "NOOP")
    ready = stdout.getvalue().splitlines()[0]
    assert ready.startswith("paged-kv: ready on http://127.0.0.1:")
    assert ("/metrics)" in ready) == metrics


def test_metrics_that_do_not_answer_are_not_named(monkeypatch, capsys):
    def answers(url, timeout):  # noqa: ARG001
        if "metrics" in url:
            raise ConnectionRefusedError
        return contextlib.nullcontext()

    monkeypatch.setattr(launch.urllib.request, "urlopen", answers)
    Announcement("http://127.0.0.1:8000", "ready on it\ncurl", "http://127.0.0.1:8001/metrics").run()
    assert capsys.readouterr().out == "ready on it\ncurl\n"
