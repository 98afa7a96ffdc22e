"""Linear layers of integers of 4 and 8 bits in Hugging Face checkpoints, in one common layout.

GPTQ, AWQ and compressed-tensors have these tensors for a layer `NAME`:

- GPTQ: `qweight` int32 `[K * bits / 32, N]` and `qzeros` int32 `[K / group, N * bits / 32]`, the lowest bits first;
  `scales` `[K / group, N]`; `g_idx` int32 `[K]`, the group of each input. Zeros are stored minus one,
  except in gptq_v2.
- AWQ ("gemm"): `qweight` int32 `[K, N / 8]`, `qzeros` int32 `[K / group, N / 8]`, whose 4-bit fields hold columns 0, 2,
  4, 6, 1, 3, 5, 7; `scales` `[K / group, N]`.
- compressed-tensors, "pack-quantized": `weight_packed` int32 `[N, K * bits / 32]` of values plus 2^(bits - 1),
  `weight_scale` `[N, K / group]`, `weight_shape`, perhaps `weight_zero_point` int32 `[N * bits / 32, K / group]` and
  `weight_g_idx` int32 `[K]`; "int-quantized": `weight` int8 `[N, K]`, `weight_scale` and perhaps
  `weight_zero_point` int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.graphs.encodings import Encoding, block_bytes
from paged_kv.graphs.models.fields import Fields

FLOATS = ("F16", "BF16", "F32")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Array = npt.NDArray[Any]
Part = tuple[tuple[str, ...], tuple[int, ...], bool]
"""A tensor of a layer: dtypes that it may have, as safetensors names them, its shape, and whether it must be there."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight `[N, K]`: `(codes - zeros) * scales`, with a scale (and a zero) for each group of inputs in a row."""

    codes: Array
    """uint8 `[N, K]` where there are zeros, int8 otherwise; groups lie side by side."""
    scales: npt.NDArray[np.float32]
    """`[N, K / group]`."""
    zeros: Array | None
    """As codes, `[N, K / group]`."""
    order: npt.NDArray[np.int64] | None = None
    """`[K]`: column j of the codes is for this input; None where that is j."""

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`, its inputs in the model's order."""
        rows, groups = self.scales.shape
        values = self.codes.reshape(rows, groups, -1).astype(np.float32)
        if self.zeros is not None:
            values -= self.zeros[..., None]
        values *= self.scales[..., None]
        flat = values.reshape(rows, -1)
        if self.order is None:
            return flat
        result = np.empty_like(flat)
        result[:, self.order] = flat
        return result

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        """The weight in blocks of 32 inputs, each of which has the scale of its group: `[N, row_bytes(encoding, K)]`.

        Scales are rounded to float16: those of that dtype are kept, and those of bfloat16 from 2^-17 to 65504.

        Raises:
            ValueError: a scale is larger than float16 holds; a zero is not the one that `encoding` means, or the inputs
                are not in the order of their groups.
        """
        if self.order is not None:
            raise ValueError("g_idx is not in order, though no reordering is announced")
        rows, inputs = self.codes.shape
        each = inputs // self.scales.shape[1] // 32  # blocks of a group
        half = 8 if encoding in ("Q4_0", "INT4") else 128
        with np.errstate(over="ignore"):
            scales = self.scales.astype(np.float16)
        if not np.isfinite(scales).all():
            raise ValueError("a scale is larger than float16 holds")
        has_zeros = encoding in ("INT4", "INT8")
        if self.zeros is not None and not has_zeros and (self.zeros != half).any():
            raise ValueError(f"a zero is not {half}, though all are said to be")
        result = np.empty((rows, inputs // 32, block_bytes(encoding)), np.uint8)
        result[..., :2] = np.repeat(scales, each, axis=1)[..., None].view(np.uint8)
        first = 2
        if has_zeros:
            assert self.zeros is not None
            zeros = np.repeat(self.zeros, each, axis=1)
            result[..., 2], result[..., 3] = zeros if half == 8 else zeros ^ 128, 0
            first = 4
        # Signed codes and those plus `half` differ in their upper bit.
        codes: Array = self.codes.view(np.uint8).reshape(rows, -1, 32)
        if half == 8:
            codes = codes if self.zeros is not None else (codes + 8) & 15
            result[..., first:] = codes[..., :16] | codes[..., 16:] << 4
        else:
            result[..., first:] = codes if self.zeros is None else codes ^ 128
        return result.reshape(rows, -1)


@dataclass(frozen=True)
class IntegerPacking:
    """A `Packing` of integers with a scale, and perhaps a zero, for each group of inputs."""

    method: str
    """As messages call it: "GPTQ", "AWQ" or "compressed-tensors"."""
    bits: int
    group: int | None
    """Inputs that share a scale; None: all of a row."""
    zero_offset: int = 0
    """The number that is missing from stored zeros."""
    symmetric: bool = False
    """There are no zeros, or all are those of signed codes."""
    packed: bool = True
    """int32 hold several codes; int8 are codes otherwise."""
    reordered: bool = False
    """Inputs may not be in the order of their groups."""

    def describe(self) -> str:
        """For one line of a log."""
        return f"{self.method} weights of {self.bits} bits"

    def tensors(self, rows: int, inputs: int) -> dict[str, Part]:
        """As `Packing`."""
        group = self.group or inputs
        if inputs % group:
            raise ValueError(f"{inputs} inputs are no multiple of groups of {group}")
        groups, each = inputs // group, 32 // self.bits
        ints, floats = ("I32",), FLOATS
        if self.method == "compressed-tensors":
            if not self.packed:
                zeros = {} if self.symmetric else {"weight_zero_point": (("I8",), (rows, groups), True)}
                return {
                    "weight": (("I8",), (rows, inputs), True),
                    "weight_scale": (floats, (rows, groups), True),
                    **zeros,
                }
            if inputs % each or (not self.symmetric and rows % each):
                raise ValueError(f"{rows} rows of {inputs} codes of {self.bits} bits do not fill int32")
            zeros = {} if self.symmetric else {"weight_zero_point": (ints, (rows // each, groups), True)}
            return {
                "weight_packed": (ints, (rows, inputs // each), True),
                "weight_scale": (floats, (rows, groups), True),
                "weight_shape": (("I64", "I32"), (2,), True),
                "weight_g_idx": (ints, (inputs,), False),
                **zeros,
            }
        if rows % each or (self.method == "GPTQ" and inputs % each):
            raise ValueError(f"{rows} rows of {inputs} codes of {self.bits} bits do not fill int32")
        codes = (inputs // each, rows) if self.method == "GPTQ" else (inputs, rows // each)
        tensors: dict[str, Part] = {
            "qweight": (ints, codes, True),
            "qzeros": (ints, (groups, rows // each), True),
            "scales": (floats, (groups, rows), True),
        }
        return tensors | ({"g_idx": (ints, (inputs,), False)} if self.method == "GPTQ" else {})

    def encoding(self, inputs: int) -> Encoding | None:
        """As `Packing`: None where groups are no multiples of 32 inputs, or not in order."""
        group = self.group or inputs
        if self.reordered or group % 32 or inputs % group:
            return None
        if self.bits == 4:
            return "Q4_0" if self.symmetric else "INT4"
        return "Q8_0" if self.symmetric else "INT8"

    @property
    def codes_name(self) -> str:
        """As `Packing`."""
        if self.method == "compressed-tensors":
            return "weight_packed" if self.packed else "weight_scale"
        return "qweight"

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> GroupedWeight:
        """As `Packing`; a ValueError too where `g_idx` is no order of whole groups."""
        get = partial(required, read)
        group, half = self.group or inputs, 1 << (self.bits - 1)
        index = None
        zeros: Array | None = None
        if self.method == "compressed-tensors":
            scales = get("weight_scale").astype(np.float32)
            if not self.packed:
                codes = get("weight")
                if not self.symmetric:
                    zeros = (get("weight_zero_point").astype(np.int16) + half).astype(np.uint8)
            else:
                if get("weight_shape").tolist() != [rows, inputs]:
                    raise ValueError(f"weight_shape is {get('weight_shape').tolist()}, expected [{rows}, {inputs}]")
                codes = (_fields(get("weight_packed"), self.bits).astype(np.int16) - half).astype(np.int8)
                index = read("weight_g_idx")
                if not self.symmetric:
                    zeros = _fields(get("weight_zero_point").T, self.bits).T
            if zeros is not None:  # codes of the same origin as zeros
                codes = (codes.astype(np.int16) + half).astype(np.uint8)
        elif self.method == "GPTQ":
            scales = get("scales").T.astype(np.float32)
            codes = _fields(get("qweight").T, self.bits)
            # The sum stays in its bits: a zero of 0 is stored as all ones.
            zeros = (_fields(get("qzeros"), self.bits).T + self.zero_offset) & (2 * half - 1)
            index = read("g_idx")
        else:
            scales = get("scales").T.astype(np.float32)
            codes, zeros = (_awq(get(name)).T for name in ("qweight", "qzeros"))
        check_finite(scales)
        order = None if index is None or np.all(index == -1) else _order(index, group, inputs)
        codes = np.ascontiguousarray(codes if order is None else codes[:, order])
        zeros = None if zeros is None else np.ascontiguousarray(zeros, np.uint8)
        return GroupedWeight(codes, np.ascontiguousarray(scales), zeros, order)


def gptq(fields: Fields) -> IntegerPacking:
    """The layers of a `quantization_config` of GPTQ."""
    fields.refuse("dynamic", "layers of different bits are not supported")
    zero_offset = fields.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0})
    group, symmetric, reordered = (
        _group(fields, "group_size"),
        fields.boolean("sym", False),
        fields.boolean("desc_act", False),
    )
    return IntegerPacking(
        "GPTQ",
        _bits(fields, "bits", (4, 8)),
        group,
        zero_offset=zero_offset,
        symmetric=symmetric,
        reordered=reordered and group is not None,
    )


def awq(fields: Fields) -> IntegerPacking:
    """The layers of a `quantization_config` of AWQ."""
    fields.one_of("version", {"gemm": None, "GEMM": None})
    if not fields.boolean("zero_point", True):
        raise fields.error("zero_point", "layers without zeros are not supported")
    bits, group = ("bits" if fields.get("bits") is not None else "w_bit"), "group_size"
    return IntegerPacking(
        "AWQ", _bits(fields, bits, (4,)), _group(fields, group if fields.get(group) is not None else "q_group_size")
    )


def compressed_integers(fields: Fields, weights: Fields, inputs: Fields | None) -> IntegerPacking:
    """compressed-tensors' `format` "pack-quantized" or "int-quantized"; `weights` and `inputs` are of its one group."""
    packed = fields.get("format") == "pack-quantized"
    if inputs is not None and not inputs.boolean("dynamic"):
        raise inputs.error("dynamic", "activations with stored scales are not supported")
    weights.one_of("type", {"int": None})
    strategy = weights.one_of("strategy", {"group": True, "channel": False})
    size = _group(weights, "group_size") if strategy else None
    symmetric = weights.boolean("symmetric", True)
    bits = _bits(weights, "num_bits", (4, 8) if packed else (8,))
    reordered = weights.get("actorder") is not None and size is not None
    return IntegerPacking("compressed-tensors", bits, size, symmetric=symmetric, packed=packed, reordered=reordered)


def _bits(fields: Fields, key: str, legal: tuple[int, ...]) -> int:
    bits = fields.integer(key)
    if bits not in legal:
        raise fields.error(key, f"expected {' or '.join(map(str, legal))}")
    return bits


def _group(fields: Fields, key: str) -> int | None:
    return None if fields.get(key) == -1 else fields.integer(key)


def required(read: Callable[[str], Array | None], name: str) -> Array:
    """A tensor of a layer that `Packing.tensors` has as one that must be there."""
    tensor = read(name)
    assert tensor is not None
    return tensor


def check_finite(scales: Array) -> None:
    """Refuses scales of which one is not finite."""
    if not np.isfinite(scales).all():
        raise ValueError("a scale is not finite")


def _fields(packed: Array, bits: int) -> npt.NDArray[np.uint8]:
    """`[R, C]` int32 as `[R, C * 32 / bits]`, the lowest bits first."""
    raw = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)  # little endian
    if bits == 8:
        return raw
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(packed), -1)


def _awq(packed: Array) -> npt.NDArray[np.uint8]:
    """`[R, C]` int32 as `[R, 8 C]`, columns in order."""
    stored = _fields(packed, 4).reshape(len(packed), -1, 8)
    result = np.empty_like(stored)
    result[..., list(_AWQ_COLUMNS)] = stored
    return result.reshape(len(packed), -1)


def _order(index: Array, group: int, inputs: int) -> npt.NDArray[np.int64] | None:
    """The inputs by their groups, as `g_idx` has them; None where they are in order."""
    expected = np.arange(inputs) // group
    if np.array_equal(index, expected):
        return None
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], expected):
        raise ValueError(f"g_idx does not put {group} inputs into each of {inputs // group} groups")
    return order
