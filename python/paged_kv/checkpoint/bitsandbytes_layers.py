"""Linear layers that bitsandbytes has quantised, in Hugging Face checkpoints: nf4 and fp4, and int8.

A layer `NAME` of 4 bits has `weight` uint8 `[N * K / 2, 1]`, two codes a byte, the first in the high bits; each code is
a place in `weight.quant_map` float32 `[16]`, multiplied by the largest magnitude of its block of the flat weight:
`weight.absmax`, float32, or uint8 places in `weight.nested_quant_map` float32 `[256]`, multiplied by
`weight.nested_absmax` of their own blocks, plus an offset. Sizes of blocks and the offset are JSON, in the bytes of
`weight.quant_state.bitsandbytes__nf4` (or `__fp4`). A layer of 8 bits has `weight` int8 `[N, K]` and `SCB` float32
`[N]`, the numbers that 127 stands for; its outliers are those of activations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from paged_kv.checkpoint.integer_layers import Array, GroupedWeight, Part, check_finite, required
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.fields import Fields

BLOCK, NESTED_BLOCK = 64, 256
"""Elements of a block, and blocks whose magnitudes share one: what every writer of checkpoints uses."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight `[N, K]` of places in a table of 16 values."""

    codes: npt.NDArray[np.uint8]
    """`[N * K / 2]`."""
    table: npt.NDArray[np.float32]
    magnitudes: npt.NDArray[np.float32]
    """`[N * K / BLOCK]`, rounded up."""
    shape: tuple[int, int]

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`."""
        pairs = np.stack(np.meshgrid(self.table, self.table, indexing="ij"), axis=-1).reshape(256, 2)
        values = pairs[self.codes].reshape(-1)
        for first in range(0, len(values), BLOCK << 10):  # a magnitude for each element takes as much as the weight
            part = values[first : first + (BLOCK << 10)]
            part *= np.repeat(self.magnitudes[first // BLOCK : first // BLOCK + (1 << 10)], BLOCK)[: len(part)]
        return values.reshape(self.shape)

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        raise ValueError(f"codes of a table are not put into {encoding}")


@dataclass(frozen=True)
class FourBits:
    """A `Packing` of 4 bits."""

    kind: str
    """ "nf4" or "fp4"."""
    nested: bool
    """The magnitudes are codes too."""

    def describe(self) -> str:
        return f"bitsandbytes' {self.kind} weights"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """As `Packing`."""
        size = rows * inputs
        if size % 2:
            raise ValueError(f"{rows} rows of {inputs} codes of 4 bits do not fill bytes")
        blocks = -(-size // BLOCK)
        tensors: dict[str, Part] = {
            "weight": (("U8",), (size // 2, 1), True),
            "weight.absmax": (("U8",) if self.nested else ("F32",), (blocks,), True),
            "weight.quant_map": (("F32",), (16,), True),
            self._state: (("U8",), (-1,), True),
        }
        if self.nested:
            tensors["weight.nested_absmax"] = (("F32",), (-(-blocks // NESTED_BLOCK),), True)
            tensors["weight.nested_quant_map"] = (("F32",), (256,), True)
        return tensors

    def encoding(self, inputs: int) -> Encoding | None:
        """As `Packing`: None, for want of a product with a table."""
        del inputs
        return None

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        return "weight.absmax"

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> CodedWeight:
        """As `Packing`."""
        get = partial(required, read)
        offset = self._offset(get(self._state).tobytes(), rows, inputs)
        magnitudes, table = get("weight.absmax"), get("weight.quant_map")
        if self.nested:
            scales = np.repeat(get("weight.nested_absmax").astype(np.float64), NESTED_BLOCK)[: len(magnitudes)]
            magnitudes = (get("weight.nested_quant_map")[magnitudes] * scales + offset).astype(np.float32)
        if not np.isfinite(magnitudes).all():
            raise ValueError("a magnitude of a block is not finite")
        return CodedWeight(get("weight").reshape(-1), table, magnitudes, (rows, inputs))

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _offset(self, state: bytes, rows: int, inputs: int) -> float:
        """The offset of nested magnitudes, after sizes and shape are found as they are expected."""
        try:
            values = json.loads(state)
            sizes = [values["blocksize"], values["shape"], values["nested_blocksize"] if self.nested else NESTED_BLOCK]
            offset = float(values["nested_offset"]) if self.nested else 0.0
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{self._state} is no state of a layer") from None
        expected = [BLOCK, [rows, inputs], NESTED_BLOCK]
        if sizes != expected or not math.isfinite(offset):
            names = "blocksize, shape and nested_blocksize"
            raise ValueError(f"{self._state} has {names} {sizes}, expected {expected}, or an offset that is not finite")
        return offset


@dataclass(frozen=True)
class EightBits:
    """A `Packing` of 8 bits with a scale for each row."""

    def describe(self) -> str:
        return "bitsandbytes' int8 weights"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """As `Packing`."""
        return {
            "weight": (("I8",), (rows, inputs), True),
            "SCB": (("F32",), (rows,), True),
            "weight_format": (("U8",), (), False),  # 0: rows, which is how checkpoints are written
        }

    def encoding(self, inputs: int) -> Encoding | None:
        """As `Packing`."""
        return None if inputs % 32 else "Q8_0"

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        return "SCB"

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> GroupedWeight:
        """As `Packing`."""
        del rows, inputs
        codes, scales, layout = required(read, "weight"), required(read, "SCB"), read("weight_format")
        if layout is not None and layout.any():
            raise ValueError(f"weight_format is {int(layout.max())}, expected 0, which is rows")
        check_finite(scales)
        return GroupedWeight(codes, (scales[:, None] / 127).astype(np.float32), None)


def bitsandbytes(fields: Fields) -> FourBits | EightBits:
    """The layers of a `quantization_config` of "bitsandbytes"."""
    four, eight = fields.boolean("load_in_4bit", False), fields.boolean("load_in_8bit", False)
    if four == eight:
        raise fields.error("load_in_4bit", "expected one of load_in_4bit and load_in_8bit")
    if eight:
        return EightBits()
    fields.one_of("bnb_4bit_quant_storage", {"uint8": None})
    kind = fields.one_of("bnb_4bit_quant_type", {"fp4": "fp4", "nf4": "nf4"})
    return FourBits(kind, fields.boolean("bnb_4bit_use_double_quant", False))
