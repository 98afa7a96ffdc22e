"""The most memory that `paged-kv generate` holds, on a checkpoint that outweighs everything else."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo import byte_tokenizer
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import write_config

MB = 1 << 20
# Wide and shallow: what a compile takes does not depend on it.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
PEAK = """
import sys
from paged_kv.cli import _run
status = _run(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line, file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A float32 checkpoint of some 600 MB, and its size."""
    folder = write_config(tmp_path_factory.mktemp("memory") / "model", **SIZES)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    header, end = {}, 0
    for name, shape in expected_tensors(load_config(folder)).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    noise = np.random.default_rng(0).standard_normal(4 * MB, np.float32).tobytes()  # repeats: what it says is no matter
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(noise)):
            file.write(noise[: end - start])
    yield folder, end
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for the peak")
def test_weights_are_held_once(checkpoint):
    folder, size = checkpoint
    prompt = ["--prompt", "p" * 500, "--max-new-tokens", "4"]
    command = [sys.executable, "-c", PEAK, "generate", "--model", str(folder), *prompt]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    pages, page_bytes = map(int, re.search(r"of (\d+) \(\d+ tokens, (\d+) bytes each", child.stderr).groups())
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", child.stderr)[1]) * 1024
    # The 500 MB are less than the weights: they are in memory once.
    assert size < peak < size + pages * page_bytes + 500 * MB
