"""Linear layers of float4 in Hugging Face checkpoints: NVFP4 and MXFP4, as compressed-tensors and ModelOpt store them.

A layer `NAME` has codes of E2M1, two a byte with the first in the low bits, `weight_packed` or (ModelOpt) `weight`
uint8 `[N, K / 2]`, and `weight_scale`: of MXFP4 powers of two, uint8 `[N, K / 32]`, of NVFP4 float8_e4m3 `[N, K / 16]`
beside one float32 number for the layer, by which they are divided (`weight_global_scale`) or multiplied
(`weight_scale_2`). Scales of activations and of a cache, where they are stored, change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged_kv.checkpoint import mxfp4, nvfp4
from paged_kv.checkpoint.float8_layers import Float8Packing
from paged_kv.checkpoint.integer_layers import Array, Part, check_finite, required
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.fields import Fields

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.stack(np.meshgrid(*[np.concatenate([_MAGNITUDES, -_MAGNITUDES])] * 2, indexing="xy"), -1).reshape(256, 2)
"""The values of a byte: of its low bits, of its high ones."""
UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Float4Weight:
    """A weight `[N, K]` of E2M1."""

    codes: npt.NDArray[np.uint8]
    """`[N, K / 2]`."""
    scales: npt.NDArray[np.float32]
    """`[N, K / group]`."""
    stored: npt.NDArray[np.uint8]
    """The scales as they are stored: E8M0, or E4M3 beside `number`."""
    number: np.float32 | None
    """The number that multiplies all scales, of NVFP4."""

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`."""
        values = _PAIRS[self.codes].reshape(*self.scales.shape, -1)
        values *= self.scales[..., None]
        return values.reshape(len(self.codes), -1)

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        """The weight in blocks of MXFP4 or NVFP4: `[N, row_bytes(encoding, K)]`."""
        codes = self.codes.reshape(*self.stored.shape, -1)
        if encoding == "MXFP4" and self.number is None:
            return mxfp4.blocks_of(codes, self.stored)
        if encoding == "NVFP4" and self.number is not None:
            return nvfp4.with_number(nvfp4.blocks_of(codes, self.stored), np.asarray(self.number))
        raise ValueError(f"float4 of these scales is not put into {encoding}")


@dataclass(frozen=True)
class Float4Packing:
    """A `Packing` of float4 layers."""

    method: str
    codes: str
    """The name of the codes."""
    group: int
    """Inputs that share a scale: 16 (NVFP4), or 32 (MXFP4)."""
    whole: str | None = None
    """The name of the layer's own scale, where there is one."""
    divides: bool = False
    """It is a divisor."""

    def describe(self) -> str:
        return f"{self.method} weights of float4"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """Name the tensors of a layer, with dtype, shape and whether each must be there."""
        if inputs % self.group:
            raise ValueError(f"{inputs} inputs are no multiple of groups of {self.group}")
        kind = ("U8", "F8_E8M0") if self.whole is None else ("F8_E4M3",)
        tensors: dict[str, Part] = {
            self.codes: (("U8",), (rows, inputs // 2), True),
            "weight_scale": (kind, (rows, inputs // self.group), True),
        }
        if self.whole is not None:
            tensors[self.whole] = (("F32",), (), True)
        unused: Part = (("F32",), (), False)
        return tensors | dict.fromkeys(UNUSED, unused)

    def encoding(self, inputs: int) -> Encoding | None:
        """Return MXFP4 or NVFP4; None where rows are no whole blocks of it."""
        if self.whole is None:
            return "MXFP4" if inputs % 32 == 0 else None
        return "NVFP4" if inputs % 64 == 0 else None

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        return "weight_scale"

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> Float4Weight:
        """Read a layer from its tensors."""
        del rows, inputs
        codes, stored = required(read, self.codes), required(read, "weight_scale")
        if self.whole is None:
            powers = stored.view(np.uint8)
            if (powers == mxfp4.NAN).any():
                raise ValueError("a scale is not finite")
            return Float4Weight(codes, np.ldexp(1.0, powers.astype(np.int32) - 127).astype(np.float32), powers, None)
        number = required(read, self.whole).astype(np.float32).reshape(1)
        scales = stored.astype(np.float32)
        with np.errstate(all="ignore"):
            number = np.float32(1) / number if self.divides else number
            scales *= number
        check_finite(scales)
        return Float4Weight(codes, scales, stored.view(np.uint8), number[0])


def compressed_float4(weights: Fields, *, powers: bool) -> Float4Packing:
    """compressed-tensors' `format` "mxfp4-pack-quantized" (`powers`) or "nvfp4-pack-quantized"."""
    weights.one_of("type", {"float": None})
    expected = {"num_bits": 4, "group_size": 32 if powers else 16}
    for key, number in expected.items():
        if weights.integer(key) != number:
            raise weights.error(key, f"expected {number}")
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "float4 with zeros is not supported")
    if powers:
        return Float4Packing("compressed-tensors", "weight_packed", 32)
    return Float4Packing("compressed-tensors", "weight_packed", 16, "weight_global_scale", divides=True)


def modelopt(fields: Fields) -> Float4Packing | Float8Packing:
    """The layers of a `quantization_config` of "modelopt"."""
    if fields.one_of("quant_algo", {"FP8": False, "NVFP4": True}):
        return Float4Packing("ModelOpt", "weight", 16, "weight_scale_2")
    return Float8Packing("ModelOpt", None, "weight_scale")
