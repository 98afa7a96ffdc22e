"""`paged-kv compile --serve`: what it makes is what the server loads, which then compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from support import serving
from support.limits import end_with_parent, limited
from support.numpy_llama import NumpyLlama

serving.require()

COMMAND = str(Path(sys.executable).with_name("paged-kv"))
OPTIONS = ("--dtype", "float32")
FLAGS = ("--", *serving.SAMPLING)
REFUSAL = "nothing may be compiled here"
REFUSES = f"""
from pathlib import Path
from types import SimpleNamespace
from max.engine import InferenceSession
load = InferenceSession.compile_async
def compile_async(self, model, **options):
    if not isinstance(model, (str, Path)):  # of a compiled file
        raise SystemError({REFUSAL!r})
    return load(self, model, **options)
InferenceSession.compile_async = compile_async
"""
"""A module that each process of Python imports as it starts."""


@pytest.fixture(scope="module")
def ahead(checkpoint, tmp_path_factory):
    """The folder: what other tests have compiled is copied to it from the cache."""
    folder = tmp_path_factory.mktemp("ahead") / "compiled"
    command = [COMMAND, "compile", str(checkpoint), "--serve", *OPTIONS, "--out", str(folder), *FLAGS]
    # Python's view of the environment: MAX, where it is imported, names another Python in the process's own.
    environment = dict(os.environ)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command, **pipes, text=True, env=environment, preexec_fn=end_with_parent)
    with limited(started, serving.START_SECONDS):
        out, messages = started.communicate(timeout=serving.START_SECONDS + 60)
    assert started.returncode == 0, messages
    files = sorted(folder.iterdir())
    assert len(files) == 3  # the step, the sampler, the log-probabilities
    assert sorted(out.splitlines()) == [f"ready: {file}" for file in files]
    return folder


@pytest.fixture
def serve(checkpoint, tmp_path):
    """Starts a server with empty caches and a compiler that refuses."""
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    caches = tmp_path / "caches"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "XDG_CACHE_HOME": str(caches),
        "MODULAR_CACHE_DIR": str(caches / "max"),
    }

    def start(log, *options, flags=FLAGS):
        command = [COMMAND, "serve", str(checkpoint), "--port", "0", *OPTIONS, *options, *flags]
        with log.open("wb") as stderr:
            started = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, preexec_fn=end_with_parent
            )
        return limited(started, serving.START_SECONDS)

    yield start
    assert not list(caches.rglob("*.graph"))
    assert not list(caches.rglob("*.mef"))


def test_a_server_finds_all_that_it_runs(ahead, serve, checkpoint, tmp_path):
    """Whatever its number of requests and longest request: the graphs do not depend on them."""
    log, model = tmp_path / "log", NumpyLlama(checkpoint)
    options = ("--compiled", str(ahead), "--max-batch-size", "3")
    with serve(log, *options, flags=(*FLAGS, "--max-length", "384")) as server:
        try:
            line = server.stdout.readline()
            assert "ready on" in line, log.read_text()[-serving.LOG_TAIL :]
            client = serving.Server(line.split()[3], "", str(checkpoint), server, log).client()
            answer = client.completions.create(
                model=str(checkpoint),
                prompt="the quick brown fox",
                max_tokens=16,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            model.assert_greedy(answer.choices[0])
        finally:
            server.terminate()
    assert not list(tmp_path.rglob("*.kernels"))  # not even the Mojo package
    assert "compiling" not in log.read_text().replace("Building, compiling, and initializing", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--page-size", "256"), "compiling the step"),
        ((), "compiling top_k_sampler of MAX"),  # without the flags of SAMPLING: another sampler
    ],
)
def test_what_needs_another_graph_is_compiled_and_the_log_says_so(ahead, serve, tmp_path, options, words):
    log = tmp_path / "log"
    with serve(log, "--compiled", str(ahead), *options, flags=FLAGS if options else ()) as server:
        try:
            assert server.stdout.readline() == ""  # it came to the compiler, and so to its end
        finally:
            server.terminate()
    assert words in log.read_text()
    assert REFUSAL in log.read_text()


def test_the_process_of_the_model_chooses_the_cpu_target_before_max_compiles(monkeypatch):
    """It does not import `architectures.py`, which does so for the server's own process."""
    from max.pipelines.lib import TextGenerationPipeline

    from paged_kv.serve import pipeline

    done = []

    def made(self, *_, **__):
        done.append("pipeline")
        self._tokenizer = SimpleNamespace(forms=None)

    monkeypatch.setattr(pipeline, "apply_cpu_target", lambda: done.append("target"))
    monkeypatch.setattr(TextGenerationPipeline, "__init__", made)
    config = Mock(model=SimpleNamespace(device_specs=[SimpleNamespace(device_type="cpu")]))
    config.model_copy.return_value = config
    pipeline.ServedPipeline(config)
    assert done == ["target", "pipeline"]
