"""Linear layers and embeddings whose weights stay in GGUF's blocks, by this package's kernels. On the CPU alone.

A quantised weight `[N, K]` is a uint8 tensor `[N, bytes]`, as the file stores it: along each row, blocks of 32 or 256
elements with their scales. The activations that it multiplies are rounded to int8 as llama.cpp rounds them: 32 to a
float16 scale beside Q4_0, Q8_0, IQ4_NL and MXFP4, 256 to a float32 scale beside the others
([how](../mojo_ops/linear/quantised/README.md)). Each activation is thus off by about half a scale at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.checks import check_value, names

Encoding = Literal["Q4_0", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""Of GGUF's encodings, those that the kernels multiply by, in the order of their indices there."""

QUANTISED_LINEAR = "paged_kv_quantised_linear"
QUANTISED_ROWS = "paged_kv_quantised_rows"

_BLOCKS: dict[Encoding, tuple[int, int]] = {
    "Q4_0": (32, 18), "Q8_0": (32, 34), "IQ4_NL": (32, 18), "MXFP4": (32, 17),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Elements and bytes of a block."""
_DTYPES = (DType.float32, DType.bfloat16)
_MOST_WEIGHTS = 15
"""Of one op: their indices are 4 bits each of one number."""


def block_elements(encoding: Encoding) -> int:
    """Elements of a row in one block."""
    return _BLOCKS[encoding][0]


def block_bytes(encoding: Encoding) -> int:
    """Bytes of a block."""
    return _BLOCKS[encoding][1]


def row_bytes(encoding: Encoding, elements: int) -> int:
    """Bytes of a row of so many elements.

    Raises:
        ShapeError: the row does not end with a block.
    """
    size = block_elements(encoding)
    if elements % size:
        raise ShapeError(f"{elements} elements are no multiple of the {size} of a {encoding} block")
    return elements // size * block_bytes(encoding)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `[N, K]` in GGUF's blocks."""

    blocks: TensorValue
    """uint8 `[N, row_bytes(encoding, K)]`. Symbolic sizes are checked when the graph runs."""
    encoding: Encoding

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ContractError(f"encoding {self.encoding!r} is none of {', '.join(ENCODINGS)}")
        check_value("blocks", self.blocks, DType.uint8, [None, None], self.blocks.device)
        if self.blocks.device.is_gpu():
            raise ContractError("blocks: quantised weights run on the CPU alone")
        size, block = self.blocks.shape[1], block_bytes(self.encoding)
        if isinstance(size, StaticDim) and int(size) % block:
            raise ShapeError(f"blocks: rows of {size} bytes, no multiple of a block's {block}")

    @property
    def elements(self) -> StaticDim | None:
        """K, None where it is symbolic."""
        size = self.blocks.shape[1]
        if not isinstance(size, StaticDim):
            return None
        return StaticDim(int(size) // block_bytes(self.encoding) * block_elements(self.encoding))


def quantised_linear(x: TensorValue, *weights: QuantisedWeight) -> list[TensorValue]:
    """`x w^T` for each weight: x `[M, K]` float32 or bfloat16, `[M, N]` in its dtype. x is rounded once for all.

    Raises:
        ContractError: there is no weight, or there are more than 15.
        ContractTypeError, ShapeError: x is neither float32 nor bfloat16, or not `[M, K]`.
    """
    if not 1 <= len(weights) <= _MOST_WEIGHTS:
        raise ContractError(f"weights: {len(weights)}, from 1 to {_MOST_WEIGHTS} are multiplied at once")
    if x.dtype not in _DTYPES:
        raise ContractTypeError(f"x: dtype {x.dtype.name} is none of {names(_DTYPES)}")
    for weight in weights:
        check_value("x", x, x.dtype, [None, weight.elements], weight.blocks.device)
    ys = ops.custom(
        QUANTISED_LINEAR,
        device=x.device,
        values=[x, *(weight.blocks for weight in weights)],
        out_types=[TensorType(x.dtype, [x.shape[0], weight.blocks.shape[0]], x.device) for weight in weights],
        parameters={"encodings": sum(_index(weight.encoding) << 4 * i for i, weight in enumerate(weights))},
    )
    return [y.tensor for y in ys]


def quantised_rows(weight: QuantisedWeight, rows: TensorValue, elements: Dim | int | None = None) -> TensorValue:
    """The rows of `weight` that `rows` `[T]` (an integer dtype) names: `[T, K]` float32, exactly.

    Args:
        weight: The matrix.
        rows: A row that the weight does not have is an error (`ValueError`) when the graph runs.
        elements: K, where the weight's size is symbolic.
    """
    if rows.rank != 1:
        raise ShapeError(f"rows: rank {rows.rank}, expected 1")
    if not rows.dtype.is_integral():
        raise ContractTypeError(f"rows: dtype {rows.dtype.name}, expected integers")
    size = weight.elements or elements
    if size is None:
        raise ShapeError("elements: the weight's size is symbolic, and so they are needed")
    (y,) = ops.custom(
        QUANTISED_ROWS,
        device=weight.blocks.device,
        values=[weight.blocks, rows if rows.dtype == DType.int32 else ops.cast(rows, DType.int32)],
        out_types=[TensorType(DType.float32, [rows.shape[0], size], weight.blocks.device)],
        parameters={"encoding": _index(weight.encoding)},
    )
    return y.tensor


def _index(encoding: Encoding) -> int:
    return ENCODINGS.index(encoding)
