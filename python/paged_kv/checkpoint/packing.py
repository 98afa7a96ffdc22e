"""Quantised linear layers of Hugging Face checkpoints: the method that config.json names, and a layer's tensors.

`quantization_config` names the method. A layer is quantised where the tensors of its method are there, whatever lists
of layers the configuration has. Integers with groups are in integer_layers.py, float8 in float8_layers.py,
float4 in float4_layers.py, bitsandbytes' codes in bitsandbytes_layers.py, HQQ's in hqq_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paged_kv.checkpoint.bitsandbytes_layers import bitsandbytes
from paged_kv.checkpoint.float4_layers import compressed_float4, modelopt
from paged_kv.checkpoint.float8_layers import compressed_float8, float8
from paged_kv.checkpoint.hqq_layers import hqq
from paged_kv.checkpoint.integer_layers import Array, Part, awq, compressed_integers, gptq
from paged_kv.errors import CheckpointError
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.fields import Fields

Facts = tuple[str, tuple[int, ...]]
"""A stored tensor's dtype, as safetensors names it, and its shape."""


class PackedWeight(Protocol):
    """A weight `[N, K]` as it is stored."""

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The weight in float32, `[N, K]`."""

    def blocks(self, encoding: Encoding) -> npt.NDArray[np.uint8]:
        """The weight in blocks of `encoding`, its packing's: `[N, row_bytes(encoding, K)]`.

        Raises:
            ValueError: they do not hold it; the text says why.
        """


class Packing(Protocol):
    """The method by which layers of a checkpoint are packed."""

    def describe(self) -> str:
        """For one line of a log."""

    def tensors(self, rows: int, inputs: int) -> Mapping[str, Part]:
        """The tensors of a layer `[rows, inputs]`, by what they are called after its name.

        Raises:
            ValueError: the layer cannot be packed in this way; the text says why.
        """

    def encoding(self, inputs: int) -> Encoding | None:
        """The blocks that a layer is put into when it is loaded; None where it is dequantised instead."""

    @property
    def codes_name(self) -> str:
        """The tensor whose presence marks a layer as quantised."""

    def unpack(self, rows: int, inputs: int, read: Callable[[str], Array | None]) -> PackedWeight:
        """A layer from its tensors, which have the shapes of `tensors`; `read` gives None for one that is not there.

        Raises:
            ValueError: a scale is not finite, or the tensors contradict each other; the text says which.
        """


def read_packing(fields: Fields) -> Packing | None:
    """The packing that `quantization_config` of a config.json names; None where there is none.

    Raises:
        CheckpointError: the method, or one of its options, is not read here; the message names key and value.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    methods: Mapping[str, Callable[[Fields], Packing]] = {
        "gptq": gptq,
        "awq": awq,
        "compressed-tensors": _compressed,
        "fp8": float8,
        "modelopt": modelopt,
        "bitsandbytes": bitsandbytes,
        "hqq": hqq,
    }
    method = section.get("quant_method")
    if method == "mxfp4":  # of experts alone: the family's file says whether it has them
        return None
    if not isinstance(method, str) or method not in methods:
        names = ", ".join(f'"{name}"' for name in methods)
        raise fields.error("quantization_config", f"quantized checkpoints are not supported, but for {names}")
    return methods[method](section)


def _compressed(fields: Fields) -> Packing:
    kinds = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float8"}
    kind = fields.one_of("format", kinds | {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"})
    groups = fields.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise fields.error("config_groups", "expected one group of layers")
    (name,) = groups.values
    group = groups.section(name)
    weights = group.section("weights") if group is not None else None
    if group is None or weights is None:
        raise groups.error(name, "expected an object with weights")
    inputs = group.section("input_activations")
    if kind == "int":
        return compressed_integers(fields, weights, inputs)
    return compressed_float8(weights) if kind == "float8" else compressed_float4(weights, powers=kind == "mxfp4")


def check_layer(
    packing: Packing, name: str, rows: int, inputs: int, tensors: Mapping[str, Facts], origin: Path
) -> set[str]:
    """The names of the tensors of a quantised layer `[rows, inputs]`, held against their headers.

    Raises:
        CheckpointError: one is missing, or of a wrong dtype or shape; the message names it.
    """
    try:
        expected = packing.tensors(rows, inputs)
    except ValueError as error:
        raise CheckpointError(f"{origin}: layer {name}: {error}") from None
    present = set()
    for part, (dtypes, shape, required) in expected.items():
        tensor = f"{name}.{part}"
        facts = tensors.get(tensor)
        if facts is None:
            if required:
                raise CheckpointError(f"{origin}: tensor {tensor} is missing")
            continue
        dtype, stored = facts
        if dtype not in dtypes:
            raise CheckpointError(f"{origin}: tensor {tensor}: expected dtype {' or '.join(dtypes)}, got {dtype}")
        if not _fits(stored, shape):
            raise CheckpointError(f"{origin}: tensor {tensor}: expected shape {list(shape)}, got {list(stored)}")
        present.add(tensor)
    return present


def _fits(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is the expected one: scales of rows, or of a layer, may lack dimensions of one."""
    if shape == (-1,):
        return len(stored) == 1
    if all(size == 1 for size in shape):
        return all(size == 1 for size in stored)
    return stored == shape or (shape[-1] == 1 and stored == shape[:-1])
