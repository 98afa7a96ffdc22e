"""The step over two virtual GPUs: what each device computes is read from the graph, which nothing here can run."""

import os
import re
import subprocess
import sys

from support import serving

serving.require()

BUILD = """
import sys
from pathlib import Path

import max.driver

max.driver.set_virtual_device_api("cuda")
max.driver.set_virtual_device_target_arch("sm_90a")
max.driver.set_virtual_device_count(2)

from max import tree
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.transformer import ReturnLogits
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.interfaces.batch_processor import ragged_kv_symbolic_input_tree
from paged_kv.checkpoint.config import load_config
from paged_kv.graphs.ops import kernels
from paged_kv.serve.graph import ServedStep

config = load_config(Path(sys.argv[1]))
devices = [DeviceRef.GPU(0), DeviceRef.GPU(1)]
kv_params = KVCacheConfig().to_params(
    dtype=DType.bfloat16,
    n_kv_heads=config.num_key_value_heads,
    head_dim=config.head_dim,
    num_layers=config.num_hidden_layers,
    devices=devices,
)
inputs = ragged_kv_symbolic_input_tree(kv_params=kv_params, device_refs=devices, include_signal_buffers=True)
step = ServedStep(config, DType.bfloat16, kv_params, devices, ReturnLogits.LAST_TOKEN)
graph = step.trace(*tree.leaves(inputs), name="step", custom_extensions=[kernels()])
print(graph)
"""


def test_heads_are_shared_and_sums_are_added_up(tmp_path):
    from support.checkpoints import write_config

    folder = write_config(
        tmp_path / "model", attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=4
    )
    # What an engine in this process adds to the environment can lead another Python astray.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MODULAR"))}
    command = [sys.executable, "-c", BUILD, str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    assert built.returncode == 0, built.stderr[-4000:]
    text, layers = built.stdout, 2
    assert text.count("paged_kv_append") == text.count("paged_kv_attention") == 2 * layers
    assert len(re.findall(r"allreduce", text)) >= 2 * layers
