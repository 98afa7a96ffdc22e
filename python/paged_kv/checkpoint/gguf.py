"""GGUF files: the model they describe, and their weights, which stay in their blocks where they are quantised.

Files are memory-mapped. A tensor that is used as it lies in the file is a view of the map; a copy is made of those
whose dtype differs from the requested one, and of the q and k of families whose rows llama.cpp reorders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.arguments import printable
from paged_kv.arrays.dtypes import numpy_dtype
from paged_kv.checkpoint import mxfp4, nvfp4
from paged_kv.checkpoint.config import checkpoint_path, config_of
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf_families import find_family, hugging_face_config, latent_tensors, scaling_tensors
from paged_kv.checkpoint.gguf_header import GgufHeader, GgufTensor
from paged_kv.checkpoint.gguf_parts import first_parts, read_parts
from paged_kv.checkpoint.weights import OnProgress, check_layers
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.graphs.encodings import GGUF_ENCODINGS, TABLE, Encoding, block_bytes
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.tensors import GATED_NORM, stored_tensors, unused_tensors, weight_dtype

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

Dequantise = Callable[[npt.NDArray[np.uint8], Encoding], npt.NDArray[np.float32]]
"""The weights `[N, K]` that blocks `[N, bytes of a row]` mean."""


def find_gguf(path: Path | str) -> Path | None:
    """The GGUF file that `path` is, or the only one in the folder that it is, or one of the parts of the only model
    there; None where there is none.

    Raises:
        CheckpointError: the folder has several models.
    """
    path = checkpoint_path(path)
    if path.suffix == ".gguf":
        return path
    files = first_parts(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        raise CheckpointError(f"{path}: {len(files)} GGUF files: name one of {', '.join(file.name for file in files)}")
    return files[0] if files else None


def open_gguf(file: Path | str) -> GgufCheckpoint:
    """Reads the header of a GGUF file, and of the other parts of the model where it is one of several.

    Raises:
        CheckpointError: as `read_parts`, or the model is of an architecture that this package does not run.
    """
    header = read_parts(file)
    with file_errors(header.file):
        find_family(header)
        return GgufCheckpoint(replace(header, tensors=dict(_split(header))))


def _split(header: GgufHeader) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors by name. q, k and v that the converter fused (`--fuse-qkv`) are split where the family has three, and
    so is the one that makes keys and values of latents in older files.
    """
    own = set(find_family(header).layer.values())
    for name, tensor in header.tensors.items():
        if "attn_k_b" in own and name.endswith(".attn_kv_b.weight"):
            yield from ((part.name, part) for part in latent_tensors(header, tensor))
            continue
        layer, _, kind = name.partition(".attn_qkv.")
        output = header.tensors.get(f"{layer}.attn_output.weight")
        parts = [f"{layer}.attn_{part}.{kind}" for part in "qkv"]
        if "attn_qkv" in own or not kind or output is None or any(part in header.tensors for part in parts):
            yield name, tensor
            continue
        # Values have as many rows as keys, and the output's columns are the queries' rows.
        queries, rows = output.shape[-1], tensor.shape[0]
        keys = (rows - queries) // 2
        bounds = [0, queries, queries + keys, rows]
        size = tensor.data.shape[0] // rows  # the data of a vector are bytes
        for part, first, end in zip(parts, bounds, bounds[1:], strict=False):
            shape, data = (max(end - first, 0), *tensor.shape[1:]), tensor.data[first * size : end * size]
            if kind not in ("weight", "bias"):  # a number of the whole matrix
                shape, data = tensor.shape, tensor.data
            yield part, GgufTensor(part, tensor.encoding, shape, data)


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file, or several that are one model. No tensor's data is read before `load`."""

    header: GgufHeader

    @cached_property
    def config(self) -> DecoderConfig:
        """The model, with the encoding of every weight that stays in blocks.

        Raises:
            CheckpointError: the metadata is incomplete, or says what this package does not run; a weight is missing, or
                in an encoding that this package does not load.
        """
        with file_errors(self.header.file):
            return self._config()

    def _config(self) -> DecoderConfig:
        config = config_of(hugging_face_config(self.header), self.header.file)
        if config.experts is not None:
            is_fused = any(".ffn_gate_up_exps." in name for name in self.header.tensors)
            config = replace(config, experts=replace(config.experts, separate_gate_up=not is_fused))
        check_layers(config, self.header.tensors, self.header.file, stacks=True)
        tensors = {name: self._tensor(name) for name in stored_tensors(config)}
        encodings = self.encodings(config)
        attends = next((index for index in range(config.num_hidden_layers) if config.attends(index)), 0)
        at = f"model.layers.{attends}.self_attn"
        names = (f"{at}.{name}_proj.weight" for name in ("q", "qkv", "q_a"))
        query = next((tensors[name] for name in names if name in tensors), None)
        dtype = {"BF16": "bfloat16", "F16": "float16"}.get(query.encoding if query else "", "float32")
        return replace(config, encodings=encodings, float32_activations=bool(encodings), dtype=dtype)

    def encodings(self, config: DecoderConfig) -> tuple[tuple[str, Encoding], ...]:
        """The weights of `stored_tensors(config)` that stay in blocks."""
        stored = ((name, self._tensor(name)) for name in stored_tensors(config))
        stay = ((name, tensor.encoding) for name, tensor in stored if not tensor.transposed)
        return tuple((name, encoding) for name, encoding in stay if encoding in GGUF_ENCODINGS)

    def load(
        self,
        config: DecoderConfig,
        dtype: DType,
        progress: OnProgress | None = None,
        dequantise: Dequantise | None = None,
    ) -> dict[str, np.ndarray]:
        """Every tensor of `stored_tensors(config)` as an array, of the map of the file where it is stored so.

        Those of `config.encodings` are uint8 `[N, bytes of a row]`, the others of `dtype`.

        Args:
            dequantise: For quantised tensors whose blocks do not lie along the rows of the step's weights: the keys of
                older files with latent attention.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of a wrong shape or encoding; a scale of a
                quantised one is not finite.
            ContractError: dequantise is required.
        """
        expected = stored_tensors(config)
        tensors = {name: self._tensor(name) for name in expected}
        self._check_shapes(config, expected, tensors)
        quantised = dict(config.encodings)
        done, total = 0, sum(tensor.data.size for tensor in tensors.values())
        arrays = {}
        for name, tensor in tensors.items():
            with file_errors(f"{self.header.file}: tensor {printable(tensor.name)}"):
                if name in quantised:
                    arrays[name] = np.ascontiguousarray(self._rows(name, self._blocks(tensor, quantised[name]), config))
                else:
                    kind, tensor = weight_dtype(name, dtype), self._upright(tensor, dequantise)
                    arrays[name] = self._floats(name, tensor, kind, config).reshape(expected[name])
            done += tensor.data.size
            if progress is not None:
                progress(done, total)
        return arrays

    def load_tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """One tensor in float32 by the file's name, which is no part of the decoder; -1 in `shape` is any size.

        Raises:
            CheckpointError: it is of a wrong shape or encoding.
        """
        tensor = self.header.tensors[name]
        sizes = tensor.shape if len(tensor.shape) == len(shape) else (1, *tensor.shape)
        fits = len(sizes) == len(shape) and all(want in (-1, size) for size, want in zip(sizes, shape, strict=True))
        if tensor.encoding not in _FLOATS or not fits:
            problem = (
                f"expected {', '.join(_FLOATS)} of shape {list(shape)}, got {tensor.encoding} {list(tensor.shape)}"
            )
            raise CheckpointError(f"{self.header.file}: tensor {name}: {problem}")
        return tensor.data.view(_FLOATS[tensor.encoding]).reshape(sizes).astype(np.float32)

    def _tensor(self, name: str) -> GgufTensor:
        """The tensor that Hugging Face calls `name`, in an encoding that is loaded."""
        stored = find_family(self.header).tensor(name)
        tensor = self.header.tensors.get(stored)
        if tensor is None:
            raise CheckpointError(f"{self.header.file}: tensor {stored} is missing")
        matrix = len(tensor.shape) >= 2 and not name.endswith(".bias")
        encodings = (*_FLOATS, *GGUF_ENCODINGS) if matrix else tuple(_FLOATS)
        if tensor.encoding not in encodings:
            problem = f"expected encoding {', '.join(encodings)}, got {tensor.encoding}"
            if matrix:
                problem += ": download the model's Q4_K_M, Q8_0 or Q2_K file instead"
            raise CheckpointError(f"{self.header.file}: tensor {stored}: {problem}")
        return tensor

    def _check_shapes(
        self, config: DecoderConfig, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, GgufTensor]
    ) -> None:
        for name, shape in expected.items():
            tensor = tensors[name]
            if tensor.shape != shape and not _is_folded(name, tensor.shape, shape):
                problem = f"expected shape {list(shape)}, got {list(tensor.shape)}"
                raise CheckpointError(f"{self.header.file}: tensor {printable(tensor.name)}: {problem}")
        used = {*(tensor.name for tensor in tensors.values()), *scaling_tensors(self.header)}
        used |= {find_family(self.header).tensor(name) for name in unused_tensors(config)}
        for tensor in tensors.values():
            if tensor.encoding == "NVFP4":
                used |= {
                    _companion(tensor, "scale"),
                    _companion(tensor, "input_scale"),
                }  # the latter is for x of 4 bits
        layers = config.num_hidden_layers
        drafts = tuple(f"blk.{layers + index}." for index in range(config.draft_layers))
        for name in self.header.tensors:
            if name not in used and not name.startswith(drafts):
                raise CheckpointError(
                    f"{self.header.file}: tensor {printable(name)} is no part of the model of the metadata"
                )

    def _upright(self, tensor: GgufTensor, dequantise: Dequantise | None) -> GgufTensor:
        """The tensor with its data in the order of its shape."""
        if not tensor.transposed:
            return tensor
        *stacks, columns, rows = tensor.shape
        if tensor.encoding in _FLOATS:
            values = tensor.data.view(_FLOATS[tensor.encoding])
        elif dequantise is None:
            raise ContractError(f"dequantise: required for tensor {printable(tensor.name)} in {tensor.encoding}")
        else:
            encoding = next(encoding for encoding in GGUF_ENCODINGS if encoding == tensor.encoding)
            blocks = self._blocks(tensor, encoding)
            values = dequantise(np.ascontiguousarray(blocks.reshape(-1, blocks.shape[-1])), encoding)
        values = np.ascontiguousarray(values.reshape(*stacks, rows, columns).swapaxes(-1, -2))
        kind = next(name for name, dtype in _FLOATS.items() if dtype == values.dtype)
        return replace(tensor, encoding=kind, data=values.view(np.uint8), transposed=False)

    def _blocks(self, tensor: GgufTensor, encoding: Encoding) -> npt.NDArray[np.uint8]:
        """The blocks of a quantised tensor as the kernels take them, with scales that are finite."""
        if encoding != "NVFP4":
            self._check_scales(tensor, encoding)
            return tensor.data
        scale = self.header.tensors.get(_companion(tensor, "scale"))
        number, experts = np.ones((), np.float32), tensor.shape[:-2]
        if scale is not None:
            if scale.encoding != "F32" or scale.shape not in ((1,), experts):
                problem = f"expected one F32, got {scale.encoding} of shape {list(scale.shape)}"
                raise CheckpointError(f"{self.header.file}: tensor {printable(scale.name)}: {problem}")
            number = scale.data.view(np.float32).reshape(experts if scale.shape == experts else ())
        try:
            return nvfp4.with_number(tensor.data, number)
        except ValueError as error:
            raise CheckpointError(f"{self.header.file}: tensor {printable(tensor.name)}: {error}") from None

    def _check_scales(self, tensor: GgufTensor, encoding: Encoding) -> None:
        """Refuses blocks whose scales are NaN or infinite: whole rows of results would be."""
        blocks = tensor.data.reshape(-1, block_bytes(encoding))
        for scales in _scales(blocks, encoding):
            wrong = ~np.isfinite(scales)
            if wrong.any():
                block = int(wrong.argmax())
                row = block * math.prod(tensor.shape[:-1]) // len(blocks)
                problem = f"row {row}: expected a finite scale, got {scales[block]}"
                raise CheckpointError(f"{self.header.file}: tensor {printable(tensor.name)}: {problem}")

    def _rows(self, name: str, data: npt.NDArray[np.uint8], config: DecoderConfig) -> npt.NDArray[np.uint8]:
        """`data` with the rows of q and k in the order that a rotation of halves wants: llama.cpp may have put rows i
        and i + D / 2 of each head beside each other. Blocks lie along rows, which stay whole.
        """
        layer = name.rpartition(".")[0]
        if not find_family(self.header).rotates_neighbours or not layer.endswith((".q_proj", ".k_proj")):
            return data
        return rows_of_halves(data, config.head_dim)

    def _floats(self, name: str, tensor: GgufTensor, dtype: DType, config: DecoderConfig) -> np.ndarray:
        # One row an element where the tensor is a vector, for `_rows`.
        values = tensor.data.view(_FLOATS[tensor.encoding]).reshape(tensor.shape)
        values = self._rows(name, values.view(np.uint8).reshape(len(values), -1), config).view(values.dtype)
        values = values.reshape(tensor.shape)
        offset = find_family(self.header).norm_offset
        if offset and name.endswith("norm.weight") and not name.endswith(f"{GATED_NORM}.weight"):
            values = values.astype(np.float32) - np.float32(offset)
        if name.endswith(".A_log"):  # the file has what it is used as, -exp(A_log)
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(-values.astype(np.float64))
            if not np.isfinite(values).all():
                raise CheckpointError(f"{self.header.file}: tensor {tensor.name}: expected numbers below zero")
        with np.errstate(over="ignore"):  # a float16 that overflows to infinity is what the cast means
            return np.ascontiguousarray(values.astype(numpy_dtype(dtype), copy=False))


def rows_of_halves(data: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows of heads `[H * head_dim, n]` whose rotated pairs are adjacent, with the first of each pair in one half."""
    pairs = data.reshape(-1, head_dim // 2, 2, data[0].size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)


def _is_folded(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a stored shape has the same elements in other dimensions: a layer of one output, a number of each head,
    a norm of groups.
    """
    same = math.prod(stored) == math.prod(expected)
    return same and (1 in (*stored, *expected) or name.endswith("mamba.norm.weight"))


def _companion(tensor: GgufTensor, name: str) -> str:
    """The name of the tensor with the scales `name` of another tensor."""
    return f"{tensor.name.removesuffix('weight')}{name}"


def _scales(blocks: npt.NDArray[np.uint8], encoding: Encoding) -> Iterator[npt.NDArray[np.floating[Any]]]:
    """The floating point numbers of each block, one after the other."""
    if encoding == "MXFP4":
        yield np.where(blocks[:, 0] == mxfp4.NAN, np.float16(np.nan), np.float16(1))
    if encoding == "IQ1_M":  # 4 bits each at the top of four numbers of 16
        parts = blocks[:, -8:].copy().view("<u2") >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
        yield np.bitwise_or.reduce(parts, axis=1, dtype=np.uint16).view(np.float16)
    for at in TABLE[encoding].scales:
        yield blocks[:, at : at + 2].view("<f2")[:, 0]
