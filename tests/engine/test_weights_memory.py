"""The memory that loading a checkpoint takes: a conversion holds one copy."""

import gc
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from paged_kv.checkpoint.weights import SINGLE_FILE
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import read_config


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
bits = np.asarray(loaded).view(np.uint16)
print(peak - before, bits.size, np.unique(bits))
"""


@pytest.mark.slow
def test_a_conversion_holds_one_copy_and_a_block(large):
    """In a process of its own, whose allocator has no memory that others gave back."""
    command = [sys.executable, "-c", CONVERSION, str(large[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    taken, size, value = done.stdout.split(maxsplit=2)
    assert (int(size), value.strip()) == (512 << 16, f"[{0x3F00}]")  # bfloat16's 0.5
    assert 64 << 20 < int(taken) < (64 << 20) + (32 << 20)
