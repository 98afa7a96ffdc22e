"""The Llama step as a graph for a GPU, built without one: every value there, and MAX's matmul for the linear layers.

benchmarks/gpu_bundle compiles it without one.
"""

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Module

from paged_kv.graphs.models.decoder import build_step
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import read_config


@pytest.mark.parametrize(("tied", "kv_format"), [(False, None), (True, None), (False, "int8"), (False, "int4")])
def test_the_step_is_built_for_a_gpu(tmp_path, tied, kv_format):
    """Building checks the device of every operand of an op; nothing but the weights comes from the host."""
    config = read_config(tmp_path / "model", tie_word_embeddings=tied)
    module = Module()
    build_step(config, DType.bfloat16, module, DeviceRef.GPU(0), kv_format=kv_format)
    text = str(module.mlir_module)
    weights = len(expected_tensors(config))
    assert text.count("paged_kv_attention") == text.count("paged_kv_append") == config.num_hidden_layers
    assert "paged_kv_linear" not in text
    assert text.count("= rmo.matmul") == 7 * config.num_hidden_layers + 1
    assert text.count("= mo.constant.external") == weights
    assert text.count("= rmo.mo.transfer") == weights  # from the host, and nothing else crosses
