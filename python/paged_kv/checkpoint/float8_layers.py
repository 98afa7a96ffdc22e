"""Linear layers of float8 in Hugging Face checkpoints: `quant_method` "fp8", and compressed-tensors "float-quantized".

A layer `NAME` has `weight` float8_e4m3 `[N, K]` and a scale for each block of it: `weight_scale_inv` (despite its name,
what the weight is multiplied by) or `weight_scale`, `[N / rows, K / inputs]` rounded up; or one scale for the layer.
Scales of activations and of a cache, where they are stored, say how a device with products of float8 would round them:
they change nothing here, where layers are dequantised when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged_kv.checkpoint.integer_layers import FLOATS, Array, Part, check_finite, required
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.fields import Fields


@dataclass(frozen=True)
class Float8Weight:
    """A weight `[N, K]` of float8, and its scales `[N / rows, K / inputs]`, rounded up."""

    values: Array
    scales: npt.NDArray[np.float32]
    block: tuple[int, int]

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`."""
        inputs = self.values.shape[1]
        result = self.values.astype(np.float32)
        for row in range(len(self.scales)):  # a scale for each element would take as much memory as the weight
            part = result[row * self.block[0] : (row + 1) * self.block[0]]
            part *= np.repeat(self.scales[row], self.block[1])[:inputs]
        return result

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        raise ValueError(f"float8 is not put into {encoding}")


@dataclass(frozen=True)
class Float8Packing:
    """A `Packing` of float8 layers."""

    method: str
    block: tuple[int, int] | None
    """Rows and inputs that share a scale, -1 being all of them; None: the whole layer has one."""
    scale: str
    """The name of the scales."""

    def describe(self) -> str:
        return f"{self.method} weights of float8"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """As `Packing`."""
        high, wide = self._sizes(rows, inputs)
        shape = (-(-rows // high), -(-inputs // wide))
        scales = {self.scale: ((*FLOATS, "F8_E8M0"), shape, True)}
        unused: Part = (FLOATS, (), False)
        weight: Part = (("F8_E4M3",), (rows, inputs), True)
        names = ("activation_scale", "input_scale", "k_scale", "v_scale")
        return {"weight": weight, **scales, **dict.fromkeys(names, unused)}

    def encoding(self, inputs: int) -> Encoding | None:
        """As `Packing`: None, for want of a product."""
        del inputs
        return None

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        return self.scale

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> Float8Weight:
        """As `Packing`."""
        scales = np.atleast_2d(required(read, self.scale).astype(np.float32))
        check_finite(scales)
        return Float8Weight(required(read, "weight"), scales, self._sizes(rows, inputs))

    def _sizes(self, rows: int, inputs: int) -> tuple[int, int]:
        high, wide = self.block or (-1, -1)
        return rows if high < 0 else high, inputs if wide < 0 else wide


def float8(fields: Fields) -> Float8Packing:
    """The layers of a `quantization_config` of "fp8"."""
    fields.one_of("fmt", {"e4m3": None, "float8_e4m3fn": None})
    fields.one_of("activation_scheme", {"dynamic": None, "static": None})
    return Float8Packing("FP8", _block(fields, "weight_block_size"), "weight_scale_inv")


def compressed_float8(weights: Fields) -> Float8Packing:
    """compressed-tensors' `format` "float-quantized"; `weights` are of its one group."""
    weights.one_of("type", {"float": None})
    if weights.integer("num_bits") != 8:
        raise weights.error("num_bits", "expected 8")
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "float8 with zeros is not supported")
    strategy = weights.one_of("strategy", {name: name for name in ("tensor", "channel", "group", "block")})
    block: tuple[int, int] | None = None
    if strategy == "channel":
        block = (1, -1)
    elif strategy == "group":
        block = (1, weights.integer("group_size"))
    elif strategy == "block":
        block = _block(weights, "block_structure")
        if block is None:
            raise weights.error("block_structure", "expected a list of two positive integers")
    return Float8Packing("compressed-tensors", block, "weight_scale")


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in value):
        raise fields.error(key, "expected a list of two positive integers")
    return value[0], value[1]
