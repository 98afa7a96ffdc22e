"""Tensor parallelism without a second device: two shares on one CPU, their sums added up by the graph itself.

It shows that the shares of weights and heads make up the model. The sums between GPUs are MAX's, and not run here.
"""

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, Module

from paged_kv.arrays.host import to_buffer
from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.weights import open_checkpoint
from paged_kv.errors import ContractError
from paged_kv.graphs.inputs import graph_inputs, input_types, step_inputs
from paged_kv.graphs.layers import StepRows
from paged_kv.graphs.models.decoder import DeviceStep, cache_shape, decode, logits
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import PagedCache, kernels
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import MODELS, CompileKey
from paged_kv.runtime.session import default_runtime
from support.checkpoints import read_config, relative_error
from support.families import make_cases

PAGE_SIZE = 16
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (33, 1, 90)]
CASES = ("llama", "phi3")  # biases; fused projections
CPU = DeviceRef.CPU()


def add_up(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [total] * len(parts)


def build(module, name, config):
    """The step with two shares: the second one's pages are one more input."""
    types = input_types(DType.float32, cache_shape(config, "pages", PAGE_SIZE), CPU)
    half = list(types.blocks.shape)
    half[4] = half[4] // 2
    blocks = BufferType(DType.float32, half, CPU)
    with Graph(
        name, input_types=[*types.flatten()[:-1], blocks, blocks], custom_extensions=[kernels()], module=module
    ) as graph:
        step = graph_inputs(graph.inputs[:-1])
        rows = StepRows.of(step.row_offsets, step.cache_lengths, step.tokens)
        shares = Parameters.shares(graph, config, DType.float32, [CPU, CPU], f"{name}/")
        steps = [
            DeviceStep(parameters, step.tokens, PagedCache.of(blocks.buffer, step.lookup_table), rows, None)
            for parameters, blocks in zip(shares, graph.inputs[-2:], strict=True)
        ]
        x, same = decode(steps, add_up)
        graph.output(logits(steps[0].parameters, x), logits(steps[1].parameters, same))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_cases(CASES, tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def models(folder):
    configs = {name: load_config(folder / name) for name in CASES}
    weights = {
        f"{name}/{of}": to_buffer(weight)
        for name in CASES
        for of, weight in open_checkpoint(folder / name).load(configs[name], DType.float32).items()
    }

    def build_all(module: Module, names):
        for name in names:
            build(module, name, configs[name])

    keys = {name: CompileKey(f"shares {name} {configs[name]}", (MODELS,)) for name in CASES}
    return configs, load_graphs(default_runtime().session, keys, build_all, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_shares_make_the_model(folder, models, name):
    configs, graphs = models
    config = configs[name]
    needed = [-(-len(prompt) // PAGE_SIZE) for prompt in PROMPTS]
    pages = np.split(np.random.default_rng(0).permutation(sum(needed)), np.cumsum(needed)[:-1])
    shape = [sum(needed), 2, config.num_hidden_layers, PAGE_SIZE, config.num_key_value_heads // 2, config.head_dim]
    blocks = [to_buffer(np.full(shape, np.nan, np.float32)) for _ in range(2)]
    inputs = step_inputs(PROMPTS, [0] * len(PROMPTS), [own.tolist() for own in pages], blocks[0])
    arguments = [to_buffer(value) for value in inputs.flatten()]
    first, second = (each.to_numpy() for each in graphs[name].execute(*arguments, blocks[1]))  # [T, vocab]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = np.concatenate([model(torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS])
    assert relative_error(first, expected) < 1e-4
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1 is no multiple of 2 devices"),
        ({"intermediate_size": 75}, "intermediate_size = 75 is no multiple of 2 devices"),
        ({"architectures": ["Olmo2ForCausalLM"]}, "normed over all heads runs on one device"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(tmp_path, said, message):
    with Graph("refused", input_types=[]) as graph, pytest.raises(ContractError, match=message):
        Parameters.shares(graph, read_config(tmp_path, **said), DType.float32, [CPU, CPU])
