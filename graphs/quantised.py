"""Linear layers and embeddings whose weights stay in GGUF's blocks, by MAX's own kernels of the CPU.

A quantised weight `[N, K]` is a uint8 tensor `[N, bytes]`: along each row, blocks of 32 (Q4_0) or 256 (Q4_K, Q6_K)
elements with their scales. MAX packs it once, when the model is bound to its weights, and multiplies it by activations
that it rounds to int8: symmetrically, one float32 scale (the largest magnitude / 127) for 32 (Q4_0) or 256 activations
of a row, products summed in int32 and scaled in float32. Each activation is thus off by half a scale at most.

What MAX's kernels do wrong is done around them here:
- packing takes rows in groups of two vectors and does not check N: other N write past the end (Q4_K, Q6_K) or are
  refused when the graph runs (Q4_0). Rows are filled up with zero blocks, and their results cut off.
- `ggml_q4_0_dequantize` of `[T, bytes]` writes K rows, whatever T is: with fewer tokens it writes past its output, with
  more it leaves rows as they were. Q4_0 embeddings are computed by ordinary graph operations instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from max.dtype import DType
from max.graph import StaticDim, TensorValue, ops
from max.graph.quantization import QuantizationEncoding

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.checks import check_value

Encoding = Literal["Q4_0", "Q4_K", "Q6_K"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""Of GGUF's encodings, those that MAX multiplies by."""

ROW_GROUP = 32
"""MAX packs rows by groups of two float32 vectors: 32 with AVX-512, 16 with AVX2, 8 with NEON. All divide this."""


def block_elements(encoding: Encoding) -> int:
    """Elements of a row in one block."""
    return QuantizationEncoding(encoding).elements_per_block


def row_bytes(encoding: Encoding, elements: int) -> int:
    """Bytes of a row of so many elements.

    Raises:
        ShapeError: the row does not end with a block.
    """
    kind = QuantizationEncoding(encoding)
    if elements % kind.elements_per_block:
        raise ShapeError(f"{elements} elements are no multiple of the {kind.elements_per_block} of a {encoding} block")
    return elements // kind.elements_per_block * kind.block_size


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `[N, K]` in GGUF's blocks."""

    blocks: TensorValue
    """uint8 `[N, row_bytes(encoding, K)]`, N and bytes static."""
    encoding: Encoding

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ContractError(f"encoding {self.encoding!r} is none of {', '.join(ENCODINGS)}")
        check_value("blocks", self.blocks, DType.uint8, [None, None], self.blocks.device)
        if self.blocks.device.is_gpu():
            raise ContractError("blocks: quantised weights run on the CPU alone")
        for axis, size in enumerate(self.blocks.shape):
            if not isinstance(size, StaticDim):
                raise ShapeError(f"blocks: dimension {axis} is {size}, a static size is expected")
        block = QuantizationEncoding(self.encoding).block_size
        if int(self.blocks.shape[1]) % block:
            raise ShapeError(f"blocks: rows of {self.blocks.shape[1]} bytes, no multiple of a block's {block}")

    @property
    def rows(self) -> int:
        """N."""
        return int(self.blocks.shape[0])

    @property
    def elements(self) -> int:
        """K."""
        kind = QuantizationEncoding(self.encoding)
        return int(self.blocks.shape[1]) // kind.block_size * kind.elements_per_block


def quantised_linear(x: TensorValue, weight: QuantisedWeight) -> TensorValue:
    """`x w^T`: x `[M, K]` float32, which is rounded to int8 by blocks; `[M, N]` float32.

    Raises:
        ContractTypeError, ShapeError: x is not float32, or not `[M, K]`.
    """
    check_value("x", x, DType.float32, [None, StaticDim(weight.elements)], weight.blocks.device)
    missing = -weight.rows % ROW_GROUP
    blocks = weight.blocks
    if missing:  # a block of zeros has scale 0: its elements are 0
        zeros = ops.constant(np.zeros((missing, int(blocks.shape[1])), np.uint8), DType.uint8, blocks.device)
        blocks = ops.concat([blocks, zeros], axis=0)
    y = ops.qmatmul(QuantizationEncoding(weight.encoding), None, x, blocks)
    return y[:, : weight.rows] if missing else y


def quantised_rows(weight: QuantisedWeight, rows: TensorValue) -> TensorValue:
    """The rows of `weight` that `rows` `[T]` (an integer dtype) names: `[T, K]` float32, exactly."""
    if rows.rank != 1:
        raise ShapeError(f"rows: rank {rows.rank}, expected 1")
    if not rows.dtype.is_integral():
        raise ContractTypeError(f"rows: dtype {rows.dtype.name}, expected integers")
    blocks = ops.gather(weight.blocks, rows, axis=0)
    if weight.encoding == "Q4_0":
        return _dequantise_q4_0(blocks, weight.elements)
    return ops.dequantize(QuantizationEncoding(weight.encoding), blocks)


def _dequantise_q4_0(blocks: TensorValue, elements: int) -> TensorValue:
    """`[T, bytes]` -> `[T, K]`. A block is a float16 scale and 16 bytes: elements 0 to 15 in their low halves, 16 to 31
    in their high ones, each 8 too large. All numbers below are integers that float32 holds.
    """
    tokens = blocks.shape[0]
    parts = ops.cast(ops.reshape(blocks, [tokens, elements // 32, 18]), DType.float32)
    low, high, pairs = parts[:, :, 0:1], parts[:, :, 1:2], parts[:, :, 2:]
    second = ops.floor(pairs / 16)
    quants = ops.concat([pairs - 16 * second, second], axis=-1) - 8  # [T, K / 32, 32]
    return ops.reshape(quants * _float16(low, high), [tokens, elements])


def _float16(low: TensorValue, high: TensorValue) -> TensorValue:
    """The finite float16 whose two bytes these are, as float32: sign, 5 bits of exponent, 10 of mantissa."""
    negative = ops.floor(high / 128)
    exponent = ops.floor((high - 128 * negative) / 4)
    mantissa = low + 256 * (high - 4 * ops.floor(high / 4))
    # Exponent 0 has no leading one, and the scale of exponent 1.
    powers = ops.constant(np.exp2(np.maximum(np.arange(32), 1) - 25.0).astype(np.float32), DType.float32, low.device)
    scale = ops.gather(powers, ops.cast(exponent, DType.int32), axis=0)
    leading = 1024 * ops.min(exponent, 1)
    return (1 - 2 * negative) * (mantissa + leading) * scale
