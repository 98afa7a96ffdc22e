"""Linear layers and embeddings whose weights stay in GGUF's blocks, by this package's kernels. On the CPU alone.

A quantised weight `[N, K]` is a uint8 tensor `[N, bytes]`, as the file stores it: along each row, blocks of 32 or 256
elements with their scales. The activations that it multiplies are rounded to int8 as llama.cpp rounds them on x86-64:
32 to a float16 scale beside encodings with blocks of 32, 256 to a float32 scale beside the others
([how](../mojo_ops/linear/quantised/README.md)). Each activation is thus off by about half a scale at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_rank, check_value
from paged_kv.graphs.encodings import ENCODINGS, Encoding, block_bytes, block_elements

QUANTISED_LINEAR = "paged_kv_quantised_linear"
QUANTISED_EXPERTS = "paged_kv_quantised_experts"
QUANTISED_ROWS = "paged_kv_quantised_rows"

_DTYPES = (DType.float32, DType.bfloat16)
_MOST_WEIGHTS = 12
"""Weights of one op at most: their indices are 4 bits each of one number."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `[N, K]` in GGUF's blocks, or a stack of weights `[E, N, K]`."""

    blocks: TensorValue
    """uint8 `[N, row_bytes(encoding, K)]`, or `[E, N, ...]`. Symbolic sizes are checked when the graph runs."""
    encoding: Encoding

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ContractError(f"encoding: expected one of {', '.join(ENCODINGS)}, got {self.encoding!r}")
        check_rank("blocks", self.blocks, 2, 3)
        check_value("blocks", self.blocks, DType.uint8, [None] * self.blocks.rank, self.blocks.device)
        if self.blocks.device.is_gpu():
            raise ContractError(f"blocks: expected the CPU, where quantised weights run, got {self.blocks.device}")
        size, block = self.blocks.shape[-1], block_bytes(self.encoding)
        if isinstance(size, StaticDim) and int(size) % block:
            raise ShapeError(f"blocks: expected rows of a multiple of {block} bytes, those of a block, got {size}")

    @property
    def elements(self) -> StaticDim | None:
        """K, None where it is symbolic."""
        size = self.blocks.shape[-1]
        if not isinstance(size, StaticDim):
            return None
        return StaticDim(int(size) // block_bytes(self.encoding) * block_elements(self.encoding))


def quantised_linear(x: TensorValue, *weights: QuantisedWeight) -> list[TensorValue]:
    """`x w^T` for each weight: x `[M, K]` float32 or bfloat16, `[M, N]` in its dtype. x is rounded once for all.

    Raises:
        ContractError: there is no weight, or there are more than 15.
        ContractTypeError, ShapeError: x is neither float32 nor bfloat16, or not `[M, K]`; a weight is a stack.
    """
    _check_operands(x, [None], weights, 2)
    ys = ops.custom(
        QUANTISED_LINEAR,
        device=x.device,
        values=[x, *(weight.blocks for weight in weights)],
        out_types=[TensorType(x.dtype, [x.shape[0], weight.blocks.shape[0]], x.device) for weight in weights],
        parameters={"encodings": _indices(weights)},
    )
    return [y.tensor for y in ys]


def quantised_expert_linear(x: TensorValue, experts: TensorValue, *stacks: QuantisedWeight) -> list[TensorValue]:
    """`x w[e]^T` for each stack w `[E, N, K]`, where each row has a weight of its own out of it.

    `experts` `[T, C]` int32 are those of `C` choices of each token; -1 gives zeros. x is `[T, K]`, each row for all
    choices of its token, or `[T, C, K]`, a row for each; float32 or bfloat16. `[T, C, N]` in x's dtype. A row has
    the bits that `quantised_linear` gives it. An expert's blocks are read once for all of its rows (of more than 512,
    once for each 512), and those of experts without rows are not.

    Raises:
        ContractError: there is no stack, or there are more than 15; their numbers of experts differ.
        ContractTypeError, ShapeError: dtype or shape of an argument. An expert that is none of a stack's is an error
            (`ValueError`) when the graph runs.
    """
    check_rank("x", x, 2, 3)
    _check_operands(x, [None] * (x.rank - 1), stacks, 3)
    count = stacks[0].blocks.shape[0]
    for stack in stacks[1:]:
        check_value("blocks", stack.blocks, DType.uint8, [count, None, None], stack.blocks.device)
    check_value("experts", experts, DType.int32, [x.shape[0], None if x.rank == 2 else x.shape[1]], x.device)
    tokens, choices = experts.shape
    rows = x if x.rank == 2 else ops.reshape(x, [tokens * choices, x.shape[2]])
    sizes = [stack.blocks.shape[1] for stack in stacks]
    ys = ops.custom(
        QUANTISED_EXPERTS,
        device=x.device,
        values=[rows, ops.reshape(experts, [tokens * choices]), *(stack.blocks for stack in stacks)],
        out_types=[TensorType(x.dtype, [tokens * choices, size], x.device) for size in sizes],
        parameters={"encodings": _indices(stacks)},
    )
    return [ops.reshape(y.tensor, [tokens, choices, size]) for y, size in zip(ys, sizes, strict=True)]


def quantised_rows(weight: QuantisedWeight, rows: TensorValue, elements: Dim | int | None = None) -> TensorValue:
    """The rows of `weight` that `rows` `[T]` (an integer dtype) names: `[T, K]` float32, exactly.

    Args:
        weight: The matrix.
        rows: A row that the weight does not have is an error (`ValueError`) when the graph runs.
        elements: K, where the weight's size is symbolic.
    """
    check_rank("rows", rows, 1)
    if not rows.dtype.is_integral():
        raise ContractTypeError(f"rows: expected integers, got {rows.dtype.name}")
    size = weight.elements or elements
    if size is None:
        raise ShapeError("elements: required where the weight's size is symbolic")
    (y,) = ops.custom(
        QUANTISED_ROWS,
        device=weight.blocks.device,
        values=[weight.blocks, rows if rows.dtype == DType.int32 else ops.cast(rows, DType.int32)],
        out_types=[TensorType(DType.float32, [rows.shape[0], size], weight.blocks.device)],
        parameters={"encoding": _index(weight.encoding)},
    )
    return y.tensor


def _check_operands(x: TensorValue, rows: Sequence[None], weights: Sequence[QuantisedWeight], rank: int) -> None:
    if not 1 <= len(weights) <= _MOST_WEIGHTS:
        raise ContractError(f"weights: expected 1 to {_MOST_WEIGHTS}, got {len(weights)}")
    check_dtype("x", x.dtype, _DTYPES)
    for weight in weights:
        check_rank("blocks", weight.blocks, rank)
        check_value("x", x, x.dtype, [*rows, weight.elements], weight.blocks.device)


def _indices(weights: Sequence[QuantisedWeight]) -> int:
    """The encodings of several weights, 5 bits each, as one number."""
    return sum(_index(weight.encoding) << 5 * i for i, weight in enumerate(weights))


def _index(encoding: Encoding) -> int:
    return ENCODINGS.index(encoding)
