"""Quantised linear layers and embeddings against GGUF's own values of the blocks, in float64.

Activations are rounded to int8 as llama.cpp rounds them; what is left is the rounding of float32 sums.
"""

import ctypes
import mmap
from typing import get_args

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, TensorType

from paged_kv.graphs.encodings import ENCODINGS, GGUF_ENCODINGS, Encoding, block_elements, row_bytes
from paged_kv.graphs.quantised import QuantisedWeight, quantised_expert_linear, quantised_linear, quantised_rows
from support import gguf_blocks, op_graphs
from support.compare import assert_bits_equal
from support.gguf_blocks import GRIDS, dequantise, random_blocks, round_activations, set_scales
from support.harness import refused

MIXED = ("Q4_K", "Q6_K", "Q8_0")
"""Encodings of three weights of one x, of both ways to round it."""
EXPERTS = ("Q4_0", "Q4_K", "MXFP4", "INT4")
"""Stacks: small and large blocks, blocks that begin at any byte, and zeros. Products know nothing of stacks."""
TOGETHER = {
    "small": [each for each in ENCODINGS if block_elements(each) == 32],
    "wide": [each for each in ENCODINGS if block_elements(each) in (64, 128)],
    "large": [each for each in ENCODINGS if block_elements(each) == 256 and not each.startswith(GRIDS)],
    "grids": [each for each in ENCODINGS if each.startswith(GRIDS)],
}
"""Encodings that share a library of kernels, which takes 10 s to build."""
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 100)
ODD = 67
"""Rows of w: more than a section, and a part of a tile."""


CPU = DeviceRef.CPU()


def encodings_of_blocks(size):
    """Encodings of stacks whose blocks have so many elements."""
    return [each for each in EXPERTS if block_elements(each) == size]


def add(title, x_dtype, encodings, **options):
    blocks = [TensorType(DType.uint8, [f"N{i}", f"bytes{i}"], CPU) for i in range(len(encodings))]
    x = TensorType(x_dtype, ["M", "K"], CPU)
    op_graphs.add(title, lambda x, *ws: quantised_linear(x, *weights(ws, encodings)), x, *blocks, **options)


def add_experts(title, shape, encodings, **options):
    stacks = [TensorType(DType.uint8, ["E", f"N{i}", f"bytes{i}"], CPU) for i in range(len(encodings))]
    types = [TensorType(DType.float32, shape, CPU), TensorType(DType.int32, ["T", "C"], CPU), *stacks]
    make = lambda x, chosen, *ws: quantised_expert_linear(x, chosen, *weights(ws, encodings))  # noqa: E731
    op_graphs.add(title, make, *types, **options)


def add_rows(title, encodings):
    blocks = [TensorType(DType.uint8, [ODD, row_bytes(encoding, 768)], CPU) for encoding in encodings]
    make = lambda chosen, *ws: [quantised_rows(w, chosen) for w in weights(ws, encodings)]  # noqa: E731
    op_graphs.add(title, make, TensorType(DType.int32, ["T"], CPU), *blocks)


def weights(ws, encodings):
    return [QuantisedWeight(w, encoding) for w, encoding in zip(ws, encodings, strict=True)]


for name, encodings in TOGETHER.items():
    add(f"quantised_{name}", DType.float32, encodings)
    add_rows(f"rows_{name}", encodings)
for size in (32, 256):
    add_experts(f"experts_{size}", ["T", "K"], encodings_of_blocks(size))
add("quantised_mixed", DType.float32, MIXED, by_max=True)
add("quantised_bfloat16", DType.bfloat16, ["Q4_K"], by_max=True)
add_experts("experts_mixed", ["T", "C", "K"], MIXED, by_max=True)


def kind_of(encoding):
    return next(name for name, encodings in TOGETHER.items() if encoding in encodings)


def product(x, blocks, encoding):
    name = kind_of(encoding)
    return among(f"quantised_{name}", TOGETHER[name], encoding, [x], blocks)


def rows_of(chosen, blocks, encoding):
    name = kind_of(encoding)
    ws = [blocks if each == encoding else np.zeros((ODD, row_bytes(each, 768)), np.uint8) for each in TOGETHER[name]]
    return op_graphs.run(f"rows_{name}", chosen, *ws)[TOGETHER[name].index(encoding)]


def experts_product(x, experts, stack, encoding):
    size = block_elements(encoding)
    return among(f"experts_{size}", encodings_of_blocks(size), encoding, [x, experts], stack)


def among(title, encodings, encoding, inputs, blocks):
    """The result of the weights in one encoding; those in the others have no rows."""
    k = inputs[0].shape[-1]
    ws = [
        blocks if each == encoding else np.zeros((*blocks.shape[:-2], 0, row_bytes(each, k)), np.uint8)
        for each in encodings
    ]
    return op_graphs.run(title, *inputs, *ws)[encodings.index(encoding)]


def activations(rows, elements, seed=0):
    x = np.random.default_rng(seed).standard_normal((rows, elements)).astype(np.float32)
    x[:, 32:64] *= 30  # a group of another magnitude
    x[-1, : min(256, elements // 2)] = 0
    return x


def check(x, blocks, encoding):
    y = product(x, blocks, encoding)
    expected = round_activations(x, encoding) @ dequantise(blocks, encoding).astype(np.float64).T
    assert y.shape == expected.shape
    largest = np.abs(expected).max(initial=0)
    assert np.abs(y - expected).max(initial=0) <= 1e-5 * largest
    return y


def depths(encoding):
    """One block, a few, and of small blocks such numbers as fill no whole tile: in parts of 64 elements, and not."""
    if block_elements(encoding) == 32:
        return 32, 96, 256, 288, 960, 1248
    return (256, 768, 1280) if block_elements(encoding) == 256 else (128, 256, 384, 1664)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_linear(encoding, rows):
    for k in depths(encoding):
        x, blocks = activations(rows, k, seed=k), random_blocks(encoding, 131, k, seed=rows)
        for n in (1, 15, 16, 33, 131):
            check(x, blocks[:n].copy(), encoding)  # in memory of its own: what is read past it is not w


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_rounding_costs(encoding):
    """Half a step of each activation at most, and the float16 of a scale."""
    x, blocks = activations(3, 512), random_blocks(encoding, 64, 512)
    w, size = dequantise(blocks, encoding).astype(np.float64), block_elements(encoding)
    step = np.abs(x.reshape(3, -1, size)).max(-1) / 127
    magnitudes = np.abs(w).reshape(64, -1, size).sum(-1)
    assert np.all(np.abs(product(x, blocks, encoding) - x.astype(np.float64) @ w.T) <= 0.57 * step @ magnitudes.T)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_blocks(encoding):
    """Zeros, the largest scales, denormal ones, all weights and activations at their ends: no sum overflows."""
    k = 768
    x = np.where(np.arange(5 * k).reshape(5, k) % 5 == 0, -8.0, 8.0).astype(np.float32)
    zeros = np.zeros((16, row_bytes(encoding, k)), np.uint8)
    assert_bits_equal(product(x, zeros, encoding), np.zeros((5, 16), np.float32), what="blocks of zeros")
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        for scale in (65504, -65504, 6e-8, -6e-8, 6.1e-5):
            blocks = np.full_like(zeros, byte)
            set_scales(blocks, encoding, np.full(16 * k, scale, np.float16))
            check(x, blocks, encoding)
            check(np.abs(x), blocks, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_activations(encoding):
    """The scale is each row's own: tiny ones, which are as good as zero, ties, largest ones, and what is not finite."""
    blocks = random_blocks(encoding, 33, 512)
    for value in (1e-45, 1e-38, 3e-7, 1.0, 8e6):
        check(np.full((3, 512), value, np.float32), blocks, encoding)
    ties = np.zeros((2, 512), np.float32)
    ties[:, ::2] = np.arange(256) % 127 + 0.5
    ties[:, ::32] = 127
    check(ties, blocks, encoding)
    x = activations(9, 512)
    right = product(x, blocks, encoding)
    for value in (np.nan, np.inf, -np.inf):
        x[4, 300] = value
        y = product(x, blocks, encoding)
        assert np.isnan(y[4]).all()
        assert_bits_equal(np.delete(y, 4, 0), np.delete(right, 4, 0), what="the other rows")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_products_are_float32_before_they_are_integers(encoding):
    """Magnitudes of half the greatest, as bfloat16 often has them: 63.5 where the product is rounded, or beside it."""
    greatest = 1 + np.arange(128, dtype=np.float32)[:, None] / 128
    signs = np.random.default_rng(0).choice(np.array([-0.5, 0.5], np.float32), (1, 512))
    signs[:, ::32] = 1
    check(greatest * signs, random_blocks(encoding, 33, 512), encoding)


@pytest.mark.parametrize("rows", [2, 7, 17, 64, 530])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_alone_gives_the_bits_it_gives_in_company(encoding, rows):
    k = 1472 if block_elements(encoding) == 32 else 1280  # small blocks end within a tile
    x, blocks = activations(rows, k), random_blocks(encoding, 77, k)
    together = product(x, blocks, encoding)
    for row in {0, rows // 2, rows - 1}:
        assert_bits_equal(
            together[row : row + 1], product(x[row : row + 1].copy(), blocks, encoding), what=f"row {row}"
        )
    assert_bits_equal(product(x, blocks[16:48].copy(), encoding), together[:, 16:48].copy(), what="some columns")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_a_group_gives_the_bits_of_its_members(rows):
    x = activations(rows, 512) if rows else np.zeros((0, 512), np.float32)
    blocks = [random_blocks(encoding, n, 512) for encoding, n in zip(MIXED, (70, 1, 33), strict=True)]
    ys = op_graphs.run("quantised_mixed", x, *blocks)
    for y, encoding, w in zip(ys, MIXED, blocks, strict=True):
        assert_bits_equal(y, product(x, w, encoding), what=encoding)


@pytest.mark.slow
def test_bfloat16_activations():
    x = activations(5, 512).astype("bfloat16")
    blocks = random_blocks("Q4_K", 35, 512)
    (y,) = op_graphs.run("quantised_bfloat16", x, blocks)
    assert_bits_equal(y, product(x.astype(np.float32), blocks, "Q4_K").astype("bfloat16"), what="rounded once")


def stacks_of(encodings, count, n, k):
    return [random_blocks(encoding, count * n, k, seed=n).reshape(count, n, -1) for encoding in encodings]


def of_each_expert(x, experts, stack, encoding):
    """Each row by the weight that it names, by the linear op."""
    y = np.zeros((*experts.shape, stack.shape[1]), np.float32)
    rows = x if x.ndim == 3 else np.repeat(x[:, None], experts.shape[1], axis=1)
    for expert in np.unique(experts[experts >= 0]):
        y[experts == expert] = product(rows[experts == expert], stack[expert].copy(), encoding)
    return y


def choose(tokens, choices, count):
    """Some experts have no rows, one has many, and some rows have no expert."""
    random = np.random.default_rng(tokens)
    chosen = random.choice([-1, 0, 2, 3, 3, 3, 3, 5], (tokens, choices)).astype(np.int32)
    assert chosen.max(initial=-1) < count
    return chosen


@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 6), (17, 2), (300, 4)])
@pytest.mark.parametrize("encoding", EXPERTS)
def test_experts_give_the_bits_of_their_linear_layers(encoding, tokens, choices):
    """More rows than are rounded at once; rows of w that end within a tile."""
    k = 288 if block_elements(encoding) == 32 else 512
    x, experts = activations(tokens, k), choose(tokens, choices, 6)
    (stack,) = stacks_of([encoding], 6, 70, k)
    y = experts_product(x, experts, stack, encoding)
    assert_bits_equal(y, of_each_expert(x, experts, stack, encoding), what="y")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_stacks_of_several_encodings_and_a_row_of_x_for_each_choice(tokens):
    x, experts = activations(max(3 * tokens, 1), 512)[: 3 * tokens].reshape(tokens, 3, 512), choose(tokens, 3, 6)
    stacks = [stacks_of([encoding], 6, n, 512)[0] for encoding, n in zip(MIXED, (70, 1, 33), strict=True)]
    ys = op_graphs.run("experts_mixed", x, experts, *stacks)
    for y, encoding, stack in zip(ys, MIXED, stacks, strict=True):
        assert_bits_equal(y, of_each_expert(x, experts, stack, encoding), what=encoding)


def test_experts_that_nobody_chose_are_not_read():
    """Their memory cannot be read."""
    x, experts = activations(9, 512), choose(9, 2, 6)
    (stack,) = stacks_of(["Q4_K"], 6, 128, 512)
    size = stack[0].nbytes
    page = mmap.PAGESIZE
    assert size % page == 0
    memory = mmap.mmap(-1, stack.nbytes)
    held = np.frombuffer(memory, np.uint8).reshape(stack.shape)
    held[:] = stack
    expected = of_each_expert(x, experts, stack, "Q4_K")
    libc = ctypes.CDLL(None, use_errno=True)
    for expert in sorted(set(range(6)) - set(experts.ravel().tolist())):
        assert libc.mprotect(ctypes.c_void_p(held[expert].ctypes.data), size, 0) == 0
    y = experts_product(x, experts, held, "Q4_K")
    assert_bits_equal(y, expected, what="y")


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 771])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows(encoding, tokens):
    """Bit for bit, and so is the unpacking of products, which is the same code."""
    blocks = random_blocks(encoding, ODD, 768)
    kinds = np.array([0, 6e-8, 6.1e-5, 6.104e-5, 1, 65504], np.float16)  # zero, subnormal, smallest normal, largest
    set_scales(blocks, encoding, np.concatenate([kinds, -kinds]))
    if encoding == "MXFP4":
        blocks[:4, 0] = 2, 3, 253, 254  # at 0 and 1 values are below float32's normal numbers: threads may flush them
    chosen = np.random.default_rng(tokens).integers(0, ODD, tokens).astype(np.int32)
    chosen[: min(tokens, 12)] = np.arange(min(tokens, 12))
    assert_bits_equal(rows_of(chosen, blocks, encoding), dequantise(blocks, encoding)[chosen], what=encoding)


@pytest.mark.slow
def test_what_the_op_refuses():
    x = np.zeros((2, 512), np.float32)
    with refused("w", row_bytes("Q4_K", 256), row_bytes("Q4_K", 512)):
        product(x, np.zeros((3, row_bytes("Q4_K", 256)), np.uint8), "Q4_K")
    with refused("x", 288, 256):
        narrow = np.zeros((2, 288), "bfloat16")
        op_graphs.run("quantised_bfloat16", narrow, np.zeros((3, row_bytes("Q4_K", 256)), np.uint8))
    (stack,) = stacks_of(["Q4_K"], 6, 8, 512)
    with refused("experts", 1, 6):
        experts_product(x, np.array([[0], [6]], np.int32), stack, "Q4_K")
    with refused("w", row_bytes("Q4_K", 256), row_bytes("Q4_K", 512)):
        experts_product(x, np.array([[0], [1]], np.int32), stack[:, :, :144].copy(), "Q4_K")
    with refused("rows", ODD, 1):
        rows_of(np.array([0, ODD], np.int32), random_blocks("Q8_0", ODD, 768), "Q8_0")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_row_bytes(encoding):
    elements = block_elements(encoding)
    assert row_bytes(encoding, 3 * elements) == random_blocks(encoding, 1, 3 * elements).size
    assert get_args(Encoding) == ENCODINGS
    assert {*GGUF_ENCODINGS, *gguf_blocks.OWN} == {*ENCODINGS}
