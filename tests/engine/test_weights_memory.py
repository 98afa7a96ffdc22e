"""The memory that loading a checkpoint takes: weights are mapped, and a conversion holds one copy."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Weight, ops
from safetensors.torch import save_file

from paged_kv.checkpoint.weights import SINGLE_FILE, open_checkpoint
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import read_config


def memory(kind):
    """Bytes of this process's memory of one kind: "Rss", or "Anonymous", which no file backs."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith(f"{kind}:"))


@pytest.fixture
def large(tmp_path):
    """A checkpoint in float32 that is 128 MiB and nearly all embeddings."""
    config = read_config(tmp_path, vocab_size=1 << 16, hidden_size=512, tie_word_embeddings=True)
    tensors = {name: torch.zeros(shape) for name, shape in expected_tensors(config).items()}
    tensors["model.embed_tokens.weight"].fill_(0.5)
    save_file(tensors, tmp_path / SINGLE_FILE)
    del tensors
    gc.collect()
    return tmp_path, config


def test_max_reads_the_map_in_place(large):
    folder, config = large
    name = "model.embed_tokens.weight"
    with Graph("sum_rows", input_types=[]) as graph:
        weight = Weight(name, DType.float32, expected_tensors(config)[name], DeviceRef.CPU())
        graph.output(ops.sum(weight))
    compiled = InferenceSession(devices=[CPU()]).compile(graph)

    anonymous, resident = memory("Anonymous"), memory("Rss")
    loaded = open_checkpoint(folder).load(config, DType.float32)
    model = InferenceSession(devices=[CPU()]).init(compiled, weights_registry=loaded)
    (sums,) = model.execute()
    assert np.all(sums.to_numpy() == 256)
    size = 128 << 20
    assert memory("Rss") - resident > 0.9 * size  # the weight was read
    assert memory("Anonymous") - anonymous < 0.3 * size  # but no copy of it was made


CONVERSION = """
import sys
import numpy as np
from max.dtype import DType
from paged_kv.checkpoint import weights
from paged_kv.checkpoint.config import load_config

def resident():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Rss:"))

class Watched(np.ndarray):
    def __setitem__(self, key, value):
        global peak
        super().__setitem__(key, value)
        peak = max(peak, resident())

folder = sys.argv[1]
config, checkpoint = load_config(folder), weights.open_checkpoint(folder)
weights._BLOCK_BYTES = 8 << 20
checkpoint.load(config, DType.float32)  # imports and caches are there before the measurement
before = peak = resident()
weights.np.empty = lambda *a, empty=np.empty: empty(*a).view(Watched)
loaded = checkpoint.load(config, DType.bfloat16)["model.embed_tokens.weight"]
bits = np.from_dlpack(loaded.view(DType.uint16))
print(peak - before, bits.size, np.unique(bits))
"""


def test_a_conversion_holds_one_copy_and_a_block(large):
    """In a process of its own, whose allocator has no memory that others gave back."""
    command = [sys.executable, "-c", CONVERSION, str(large[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    taken, size, value = done.stdout.split(maxsplit=2)
    assert (int(size), value.strip()) == (512 << 16, f"[{0x3F00}]")  # bfloat16's 0.5
    assert 64 << 20 < int(taken) < (64 << 20) + (32 << 20)
