"""Quantised linear layers and embeddings against GGUF's own values of the blocks, in float64."""

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from paged_kv.graphs.quantised import (
    ENCODINGS,
    QuantisedWeight,
    block_elements,
    quantised_linear,
    quantised_rows,
    row_bytes,
)
from support import op_graphs
from support.gguf_blocks import dequantise, random_blocks

SHAPES = {"whole": (64, 512), "odd": (259, 768), "one": (1, 256)}
"""N and K: whole groups of rows; a part of one at the end; less than one, in one block of the K encodings."""
ACTIVATIONS = {"Q4_0": 32, "Q4_K": 256, "Q6_K": 256}
"""How many of a row share one scale."""


@op_graphs.add
def build(module):
    cpu = DeviceRef.CPU()
    for encoding in ENCODINGS:
        for name, (rows, elements) in SHAPES.items():
            blocks = TensorType(DType.uint8, [rows, row_bytes(encoding, elements)], cpu)
            x = TensorType(DType.float32, ["M", elements], cpu)
            with Graph(f"linear_{encoding}_{name}", input_types=[x, blocks], module=module) as graph:
                x, w = (value.tensor for value in graph.inputs)
                graph.output(quantised_linear(x, QuantisedWeight(w, encoding)))
        rows, elements = SHAPES["odd"]
        tokens = TensorType(DType.uint32, ["T"], cpu)
        blocks = TensorType(DType.uint8, [rows, row_bytes(encoding, elements)], cpu)
        with Graph(f"rows_{encoding}", input_types=[tokens, blocks], module=module) as graph:
            chosen, w = (value.tensor for value in graph.inputs)
            graph.output(quantised_rows(QuantisedWeight(w, encoding), chosen))


def rounded(x, group):
    """`x` as MAX rounds it: int8 by groups, the largest magnitude of each being 127."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    steps = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0)
    return (np.rint(groups * steps).astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 65])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_linear(encoding, shape, rows):
    n, k = SHAPES[shape]
    blocks = random_blocks(encoding, n, k)
    w = dequantise(blocks, encoding).astype(np.float64)
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    x[:, 32:64] *= 100  # each group has a scale of its own
    x[-1, :256] = 0
    y = op_graphs.models()[f"linear_{encoding}_{shape}"].execute(x, blocks)[0].to_numpy()
    assert y.shape == (rows, n)
    # Sums of int32 products are exact; each block's sum is rounded a few times in float32.
    expected = rounded(x, ACTIVATIONS[encoding])
    assert np.all(np.abs(y - expected @ w.T) <= 1e-6 * (1 + np.abs(expected) @ np.abs(w.T)))
    # What that rounding costs: half a step of each activation at most.
    step = np.abs(x.reshape(rows, -1, ACTIVATIONS[encoding])).max(-1) / 127
    magnitudes = np.abs(w).reshape(n, -1, ACTIVATIONS[encoding]).sum(-1)
    assert np.all(np.abs(y - x.astype(np.float64) @ w.T) <= 0.501 * step @ magnitudes.T + 1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 5, 768, 771])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows(encoding, tokens):
    """Exactly, for fewer tokens than K, as many and more: MAX's own op takes the one for the other (Q4_0)."""
    n, k = SHAPES["odd"]
    blocks = random_blocks(encoding, n, k)
    if encoding == "Q4_0":  # every kind of a float16: zeros, subnormal, smallest normal, largest, of both signs
        kinds = np.array([0, 6e-8, 6.1e-5, 6.104e-5, 1, 65504], np.float16)
        kinds = np.concatenate([kinds, -kinds])
        blocks.reshape(n, -1, 18)[: len(kinds), 0, :2] = kinds[:, None].view(np.uint8)
    chosen = np.random.default_rng(tokens).integers(0, n, tokens).astype(np.uint32)
    chosen[: min(tokens, 12)] = np.arange(min(tokens, 12))
    values = op_graphs.models()[f"rows_{encoding}"].execute(chosen, blocks)[0].to_numpy()
    np.testing.assert_array_equal(values, dequantise(blocks, encoding)[chosen])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_row_bytes(encoding):
    elements = block_elements(encoding)
    assert row_bytes(encoding, 3 * elements) == random_blocks(encoding, 1, 3 * elements).size
