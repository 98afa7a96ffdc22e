"""A process that ends right after a compile does so in order, however late MAX's pool is told of the compile's end."""

import subprocess
import sys

import pytest

PROGRAM = """
import time
from max.engine import api

class Late:
    "MAX's lock; what releases it after a compile, a thread of MAX's pool, is slow, as on a machine that is busy."
    def __init__(self):
        self.lock, self.acquire = api._COMPILATION_LOCK, api._COMPILATION_LOCK.acquire
    def release(self):
        for _ in range(1000):
            time.sleep(0.001)  # and asks for Python again
        self.lock.release()
    def __enter__(self):
        self.acquire()
    def __exit__(self, *_):
        self.lock.release()

api._COMPILATION_LOCK = Late()
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from paged_kv.runtime.artefacts import compile_graphs
from paged_kv.runtime.session import default_runtime

def build(module, names):
    with Graph(names[0], input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())], module=module) as graph:
        graph.output(graph.inputs[0].tensor + 1)

compile_graphs(default_runtime().session, ["plus_one"], build)
"""
SECONDS = 600
"""The time of one program: three seconds, or thirty where MAX's own cache is empty."""


@pytest.mark.slow
def test_a_process_that_ends_after_a_compile():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
