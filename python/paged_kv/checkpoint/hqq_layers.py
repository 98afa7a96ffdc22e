"""Linear layers of HQQ in Hugging Face checkpoints: `scale * (q - zero)` with zeros that are no integers.

A layer `NAME` of `[N, K]` has its integers as a matrix: `[N K / group, group]` with a scale of each row (`axis` 1), or
`[group, N K / group]` with one of each column (`axis` 0). `W_q` has the rows of that matrix in parts of as many rows,
the first part in the highest bits of a byte; of 3 bits ten parts in 30 bits of an int32. `scale` and `zero` are numbers
of each group. The other tensors repeat the configuration, and say nothing of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged_kv.checkpoint.integer_layers import FLOATS, Array, Part, required
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.fields import Fields

_REPEATED = {"nbits": "bits", "group_size": "group", "axis": "axis"}
"""Tensors of one number that a layer repeats, and the fields of `HqqPacking` that they must equal."""
_LISTS = ("shape", "packing", "unpack_view_dtype", "compute_dtype")
_SWITCHES = (
    *("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)
"""Tensors that are not read."""


@dataclass(frozen=True)
class HqqWeight:
    """A weight `[N, K]`."""

    shape: tuple[int, int]
    codes: npt.NDArray[np.uint8]
    """The matrix of integers."""
    scales: npt.NDArray[np.float32]
    """`[N K / group, 1]` or `[1, N K / group]`."""
    zeros: npt.NDArray[np.float32]

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`."""
        return ((self.codes - self.zeros) * self.scales).reshape(self.shape)

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        """The weight in blocks of Q4_1: `[N, row_bytes("Q4_1", K)]`."""
        if encoding != "Q4_1":
            raise ValueError(f"HQQ's integers are not put into {encoding}")
        quads = self.codes.reshape(-1, 32)
        with np.errstate(over="ignore"):
            both = [values.astype("<f2") for values in (self.scales, -self.zeros * self.scales)]
        if not all(np.isfinite(values).all() for values in both):
            raise ValueError("float16 cannot hold a scale")
        numbers = [np.repeat(values, self.codes.shape[1] // 32, axis=0).view(np.uint8) for values in both]
        return np.concatenate([*numbers, quads[:, :16] | quads[:, 16:] << 4], axis=1).reshape(self.shape[0], -1)


@dataclass(frozen=True)
class HqqPacking:
    """A `Packing` of HQQ's layers."""

    bits: int
    group: int
    axis: int

    def describe(self) -> str:
        return f"HQQ weights of {self.bits} bits"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """Name the tensors of a layer, with dtype, shape and whether each must be there."""
        (high, wide), groups = self._matrix(rows, inputs)
        parts = 10 if self.bits == 3 else 8 // self.bits
        if self.bits != 3 and high % parts:
            raise ValueError(f"{high} rows of {wide} integers are no multiple of the {parts} in a byte")
        dtype = "I32" if self.bits == 3 else "U8"
        numbers: Part = (FLOATS, (groups, 1) if self.axis else (1, groups), True)
        tensors: dict[str, Part] = {"W_q": ((dtype,), (math.ceil(high / parts), wide), True)}
        tensors |= {"scale": numbers, "zero": numbers}
        tensors |= dict.fromkeys(_REPEATED, (("I32", "I64"), (), False))
        integers = ("U8", "I32", "I64")
        return (
            tensors | dict.fromkeys(_LISTS, (integers, (-1,), False)) | dict.fromkeys(_SWITCHES, (integers, (), False))
        )

    def encoding(self, inputs: int) -> Encoding | None:
        """Return Q4_1 where 4 bits lie in groups of whole blocks along a row, else None: it is dequantised."""
        return "Q4_1" if (self.bits, self.axis) == (4, 1) and self.group % 32 == inputs % self.group == 0 else None

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        return "W_q"

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> HqqWeight:
        """Read a layer from its tensors."""
        for name, field in _REPEATED.items():
            number = read(name)
            if number is not None and int(number.reshape(())) != getattr(self, field):
                raise ValueError(f"{name} is {int(number.reshape(()))}, the configuration says {getattr(self, field)}")
        stored, scales, zeros = (required(read, name) for name in ("W_q", "scale", "zero"))
        (high, _), _ = self._matrix(rows, inputs)
        size = 30 if self.bits == 3 else 8
        shifts = range(size - self.bits, -1, -self.bits)
        parts = [(stored >> shift & (1 << self.bits) - 1).astype(np.uint8) for shift in shifts]
        numbers = [values.astype(np.float32) for values in (scales, zeros)]
        if not all(np.isfinite(values).all() for values in numbers):
            raise ValueError("a scale or a zero is not finite")
        return HqqWeight((rows, inputs), np.concatenate(parts)[:high], *numbers)

    def _matrix(self, rows: int, inputs: int) -> tuple[tuple[int, int], int]:
        """The shape of the matrix of integers, and the number of groups."""
        if rows * inputs % self.group:
            raise ValueError(f"{rows} x {inputs} weights are no multiple of groups of {self.group}")
        groups = rows * inputs // self.group
        return ((groups, self.group) if self.axis else (self.group, groups)), groups


def hqq(fields: Fields) -> HqqPacking:
    """`quantization_config` of "hqq": one kind of layer for all."""
    config = fields.section("quant_config")
    weights = None if config is None else config.section("weight_quant_params")
    if config is None or weights is None:
        raise fields.error("quant_config", "expected weight_quant_params of all layers")
    for key in ("scale_quant_params", "zero_quant_params"):
        config.refuse(key, "scales that are quantised themselves are not supported")
    weights.refuse("view_as_float", "not supported")
    bits = weights.integer("nbits", default=4)
    if bits not in (1, 2, 3, 4, 8):
        raise weights.error("nbits", "expected 1, 2, 3, 4 or 8")
    if not weights.boolean("channel_wise", default=True):
        raise weights.error("channel_wise", "one scale for a layer is not supported")
    if weights.get("group_size") is None and "group_size" in weights.values:
        raise weights.error("group_size", "one group for a row is not supported")
    axis = weights.integer("axis", default=1, least=0, most=1)
    return HqqPacking(bits, weights.integer("group_size", default=64), axis)
