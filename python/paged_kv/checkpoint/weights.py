"""Safetensors in: a memory-mapped checkpoint whose tensors are read in place, converted only where the dtype differs.

A weight that is a view of the memory map is held once, in pages that the system can drop and read again. Only the rare
tensor that is not aligned to its dtype, every tensor whose dtype differs from the requested one, and what is stacked
for one op (experts, heads of latent attention) become copies in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.dtype import DType
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors import SafetensorError, safe_open

from paged_kv.arguments import printable
from paged_kv.arrays.dtypes import numpy_dtype
from paged_kv.checkpoint import mxfp4
from paged_kv.checkpoint.config import checkpoint_folder
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.packing import PackedWeight, Packing, check_layer
from paged_kv.errors import CheckpointError
from paged_kv.files import open_regular, path_of, read_regular
from paged_kv.graphs.encodings import Encoding, row_bytes
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.tensors import (
    Assembled,
    TensorPart,
    assembled_tensors,
    checkpoint_tensors,
    least_tensors,
    stored_tensors,
    unused_tensors,
    weight_dtype,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Safetensors' name of each dtype that a weight may have.
DTYPES = {"F32": DType.float32, "BF16": DType.bfloat16, "F16": DType.float16}
FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""Dtypes of quantised layers alone."""
_BLOCK_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all after each step of a load."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it; `dtype` is safetensors' own name, such as "BF16"."""

    file: Path
    name: str
    """In the file; the step may have another name for it."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by the names that the step has for them. Nothing is read before `load`."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    packing: Packing | None = None
    """The packing of quantised linear layers: those of `encodings` are put into blocks when they are loaded, and others
    are dequantised."""

    def named_for(self, family: Family) -> Checkpoint:
        """The same tensors by the step's names, without those that the family's text does not need."""
        tensors: dict[str, StoredTensor] = {}
        is_base = "embed_tokens.weight" in self.tensors  # saved without a head, as models that embed are
        for name, stored in self.tensors.items():
            if name.startswith(family.unread):
                continue
            if is_base and name.startswith(("embed_tokens.", "layers.", "norm.")):
                name = f"model.{name}"
            for theirs, ours in family.renames.items():
                name = name.replace(theirs, ours, 1)
            if name in tensors:
                both = f"both {printable(tensors[name].name)} and {printable(stored.name)}"
                raise CheckpointError(f"{stored.file}: {name} of the model is {both}")
            tensors[name] = stored
        return replace(self, tensors=tensors)

    def has_own_head(self) -> bool:
        """Return whether there is a `lm_head.weight` that differs from the embeddings.

        Then it makes the logits, whatever the configuration says of tied embeddings, as in transformers.
        """
        head, embeddings = (self.tensors.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
        if head is None or embeddings is None:
            return False
        if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape) or head.dtype not in DTYPES:
            return True
        rows = max(1, _BLOCK_BYTES // max(1, math.prod(head.shape[1:]) * DTYPES[head.dtype].size_in_bytes))
        with (
            safe_open(head.file, framework="np", backend="pread") as of_head,
            safe_open(embeddings.file, framework="np", backend="pread") as of_embeddings,
        ):
            ours, theirs = of_head.get_slice(head.name), of_embeddings.get_slice(embeddings.name)
            starts = range(0, head.shape[0], rows)
            blocks = (slice(start, min(start + rows, head.shape[0])) for start in starts)
            return any(ours[block].tobytes() != theirs[block].tobytes() for block in blocks)

    def encodings(self, config: DecoderConfig) -> tuple[tuple[str, Encoding], ...]:
        """The weights of `stored_tensors(config)` that are put into blocks, by what files' headers say."""
        if self.packing is None:
            return ()
        assembled, in_blocks = assembled_tensors(config, self.tensors), []
        for name, shape in stored_tensors(config).items():
            parts = [name] if name not in assembled else list(assembled[name].sources)
            encoding = self.packing.encoding(shape[-1])
            of_heads = name in assembled and ".experts." not in name  # rows of one tensor, transposed
            layers = [f"{part.removesuffix('.weight')}.{self.packing.codes_name}" for part in parts]
            if len(shape) >= 2 and encoding and not of_heads and all(layer in self.tensors for layer in layers):
                in_blocks.append((name, encoding))
        return tuple(in_blocks)

    def load(self, config: DecoderConfig, dtype: DType, progress: OnProgress | None = None) -> dict[str, np.ndarray]:
        """Every weight of `stored_tensors(config)` as an array of `dtype`; those of `config.encodings` are uint8,
        `[..., bytes of a row]`.

        Those of `assembled_tensors(config)` are put together in memory from the files' tensors.
        An array keeps the memory behind it alive: the map of its file, or its own copy. Do not write to it.
        Of the file's other tensors, `rotary_emb.inv_freq` (older checkpoints), `lm_head.weight` with tied embeddings,
        those of `config.draft_layers` and `unused_tensors` are ignored; any other one means that the model is not the
        one that would be computed.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of a wrong shape or dtype, or `dtype` is not one of
                float32, bfloat16 and float16.
        """
        if dtype not in DTYPES.values():
            raise CheckpointError(f"{self.folder}: weights cannot be loaded as {dtype.name}")
        check_layers(config, self.tensors, self.folder)
        expected, assembled = stored_tensors(config), assembled_tensors(config, self.tensors)
        encodings = dict(config.encodings)
        sources = checkpoint_tensors(config, self.tensors)
        packed = self._packed(sources)
        as_bytes = {name for weight in assembled.values() if weight.is_packed for name in weight.sources}
        self._check(config, sources, packed, as_bytes)

        sizes = {name: math.prod(shape) * dtype.size_in_bytes for name, shape in expected.items()}
        done, total = 0, sum(sizes.values())
        in_files = [name for name in expected if name not in assembled and name not in packed]
        with file_errors(self.folder):
            maps = {file: _map(file) for file in sorted({self.tensors[name].file for name in in_files})}
        arrays = {}
        for name, shape in expected.items():
            with file_errors(f"{self.folder}: tensor {printable(name)}"):
                if name in assembled:
                    arrays[name] = self._assemble(shape, assembled[name], dtype, packed, encodings.get(name))
                elif name in packed and name in encodings:
                    arrays[name] = np.ascontiguousarray(self._in_blocks(name, packed[name], encodings[name]))
                elif name in packed:
                    with np.errstate(over="ignore"):
                        values = self._dequantised(name, packed[name]).astype(numpy_dtype(dtype))
                    arrays[name] = np.ascontiguousarray(values)
                else:
                    stored, kind = self.tensors[name], weight_dtype(name, dtype)
                    view = maps[stored.file][stored.name]
                    in_place = DTYPES[stored.dtype] == kind and view.ctypes.data % kind.align == 0
                    values = view.view(numpy_dtype(kind)) if in_place else _copy(stored, kind)
                    arrays[name] = values.reshape(shape)
            done += sizes[name]
            if progress is not None:
                progress(done, total)
        return arrays

    def load_tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """One tensor in float32, which is no part of the decoder.

        Raises:
            CheckpointError: it is missing, or of a wrong shape or dtype.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        if stored.shape != shape or stored.dtype not in DTYPES:
            problem = f"expected {' or '.join(DTYPES)} of shape {list(shape)}, got {stored.dtype} {list(stored.shape)}"
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: {problem}")
        return _copy(stored, DType.float32)

    def _packed(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
        """The shapes of the weights that are quantised, after their tensors' headers were found in order."""
        shapes: dict[str, tuple[int, int]] = {}
        if self.packing is None:
            return shapes
        tensors = {name: (stored.dtype, stored.shape) for name, stored in self.tensors.items()}
        for name, shape in expected.items():
            layer = name.removesuffix(".weight")
            if len(shape) == 2 and f"{layer}.{self.packing.codes_name}" in tensors:
                check_layer(self.packing, layer, shape[0], shape[1], tensors, self.folder)
                shapes[name] = shape[0], shape[1]
        return shapes

    def _dequantised(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        """A quantised weight in float32."""
        return self._unpacked(name, shape, lambda weight: weight.dequantised())

    def _in_blocks(self, name: str, shape: tuple[int, int], encoding: Encoding) -> np.ndarray:
        """A quantised weight in blocks."""
        return self._unpacked(name, shape, lambda weight: weight.blocks(encoding))

    def _unpacked(self, name: str, shape: tuple[int, int], make: Callable[[PackedWeight], np.ndarray]) -> np.ndarray:
        """Return what `make` makes of a quantised weight."""
        assert self.packing is not None
        layer = name.removesuffix(".weight")

        def read(part: str) -> np.ndarray | None:
            stored = self.tensors.get(f"{layer}.{part}")
            if stored is None:
                return None
            values = stored_values(stored)
            per_row = part in ("weight_scale", "weight_zero_point") and values.ndim == 1
            return values[:, None] if per_row else values

        try:
            return make(self.packing.unpack(*shape, read))
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: layer {layer}: {error}") from None

    def _is_zero(self, name: str) -> bool:
        """Return whether there is a tensor of this name, and nothing but zeros in it."""
        stored = self.tensors.get(name)
        if stored is None or len(stored.shape) != 1 or stored.dtype not in DTYPES:
            return False
        return not np.any(stored_values(stored))

    def _assemble(
        self,
        shape: tuple[int, ...],
        assembled: Assembled,
        dtype: DType,
        packed: Mapping[str, tuple[int, int]],
        encoding: Encoding | None,
    ) -> np.ndarray:
        """A weight from rows of several tensors, in memory of its own; the files are read and not mapped meanwhile."""
        if encoding is not None:
            shape, dtype = (*shape[:-1], row_bytes(encoding, shape[-1])), DType.uint8
        whole = np.empty(shape, numpy_dtype(dtype))
        result = whole if assembled.is_stack else whole[None]
        with ExitStack() as stack, np.errstate(over="ignore"):
            files = {self.tensors[name].file for name in assembled.sources if name not in packed}
            opened = {
                file: stack.enter_context(safe_open(file, framework="np", backend="pread")) for file in sorted(files)
            }
            last: tuple[str, np.ndarray] | None = None
            for piece in assembled.pieces():
                if piece.name in packed:
                    if last is None or last[0] != piece.name:
                        packed_shape = packed[piece.name]
                        values = self._in_blocks(piece.name, packed_shape, encoding) if encoding else None
                        last = piece.name, self._dequantised(piece.name, packed_shape) if values is None else values
                    rows = last[1] if piece.rows is None else last[1][slice(*piece.rows)]
                else:
                    rows = self._read(piece, piece.name, opened)
                if piece.scales is not None:
                    rows = self._blocks(rows, piece.scales, self._read(piece, piece.scales, opened))
                rows = rows.T if piece.transposed else rows
                index, first = piece.at
                if piece.alternating:
                    half = first + len(rows) // 2
                    result[index, first:half], result[index, half : first + len(rows)] = rows[0::2], rows[1::2]
                else:
                    result[index, first : first + len(rows)] = rows
        return whole

    def _read(self, piece: TensorPart, name: str, opened: Mapping[Path, Any]) -> npt.NDArray[Any]:
        """The rows of a tensor that a part names, as the file has them."""
        tensor = opened[self.tensors[name].file].get_slice(self.tensors[name].name)
        if piece.index is not None:
            rows: npt.NDArray[Any] = tensor[piece.index : piece.index + 1][0]
        else:
            rows = tensor[:] if piece.rows is None else tensor[slice(*piece.rows)]
        return rows

    def _blocks(self, codes: npt.NDArray[Any], name: str, scales: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """MXFP4 codes and scales in blocks; `name` is the tensor of the scales."""
        if (scales == mxfp4.NAN).any():
            stored = self.tensors[name]
            raise CheckpointError(f"{stored.file}: tensor {stored.name} has a scale that is NaN")
        return mxfp4.blocks_of(codes, scales)

    def _check(
        self,
        config: DecoderConfig,
        expected: Mapping[str, tuple[int, ...]],
        packed: Mapping[str, tuple[int, int]],
        as_bytes: Container[str],
    ) -> None:
        parts: set[str] = set()
        for name, shape in expected.items():
            if name in packed and self.packing is not None:
                layer = name.removesuffix(".weight")
                parts |= {f"{layer}.{part}" for part in self.packing.tensors(*packed[name])}
                if self._is_zero(f"{layer}.bias"):  # written for layers that have none
                    parts.add(f"{layer}.bias")
                continue
            stored = self.tensors.get(name)
            if stored is None:
                raise CheckpointError(f"{self.folder}: tensor {name} is missing")
            # ERNIE's routers and convolutions have a dimension of one more.
            if stored.shape != shape and tuple(size for size in stored.shape if size != 1) != shape:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored.name}: expected shape {list(shape)}, got {list(stored.shape)}"
                )
            dtypes = ("U8",) if name in as_bytes else tuple(DTYPES)
            if stored.dtype not in dtypes:
                problem = f"expected dtype {' or '.join(dtypes)}, got {stored.dtype}"
                raise CheckpointError(f"{stored.file}: tensor {stored.name}: {problem}")
        own = config.num_hidden_layers
        unread = tuple(f"model.layers.{own + index}." for index in range(config.draft_layers))
        unused = unused_tensors(config)
        for name, stored in self.tensors.items():
            # lm_head.weight is expected unless it is tied, and then it repeats the embeddings.
            is_expected = name in expected or name in parts or name in unused or name == "lm_head.weight"
            if not is_expected and not name.startswith(unread) and not name.endswith("rotary_emb.inv_freq"):
                shown = printable(stored.name)
                raise CheckpointError(f"{stored.file}: tensor {shown} is no part of the model of config.json")


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Reads the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
        CheckpointError: there is no such file; a file is cut short or is not safetensors; the index is no index, names
            a shard that is missing, or misplaces a tensor; two shards hold the same tensor.
    """
    path = checkpoint_folder(folder)
    index = path / INDEX_FILE
    if (path / SINGLE_FILE).is_file():
        return Checkpoint(path, _read_header(path / SINGLE_FILE))
    if not index.is_file():
        raise CheckpointError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")

    with file_errors(index):
        weight_map = _read_index(index)
        shards = shards_of(index)
        for shard in shards:
            if not os.path.isfile(path / shard):  # unlike Path.is_file, no error for a name that is too long
                raise CheckpointError(f"{index}: shard {printable(shard)} is missing from the folder")
        checkpoint = open_files([path / shard for shard in shards])
        for name, shard in weight_map.items():
            if name not in checkpoint.tensors or checkpoint.tensors[name].file.name != shard:
                raise CheckpointError(f"{index}: tensor {printable(name)} is not in {shard}")
        return checkpoint


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index of shards names.

    Raises:
        CheckpointError: it is no index.
    """
    return sorted(set(_read_index(index).values()))


def open_files(files: Sequence[Path]) -> Checkpoint:
    """Reads the headers of safetensors files, at least one, that hold one model together.

    Raises:
        CheckpointError: a file is cut short or is not safetensors; two files hold the same tensor.
    """
    folder = files[0].parent
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _read_header(file).items():
            if name in tensors:
                both = f"both {tensors[name].file.name} and {file.name}"
                raise CheckpointError(f"{folder}: tensor {printable(name)} is in {both}")
            tensors[name] = stored
    return Checkpoint(folder, tensors)


def check_layers(config: DecoderConfig, stored: Collection[str], origin: Path, *, stacks: bool = False) -> None:
    """Refuses a configuration with more layers or experts than there are tensors, before the names of all their weights
    are made.

    Args:
        stored: The names of the tensors.
        origin: Their file or folder.
        stacks: Experts lie in tensors of all of them, as in every GGUF file, whose names are not Hugging Face's.

    Raises:
        CheckpointError: that is so.
    """
    if config.num_hidden_layers > len(stored):
        raise CheckpointError(f"{origin}: {config.num_hidden_layers} layers, but only {len(stored)} tensors")
    if config.experts is not None and not stacks and least_tensors(config, stored) > len(stored):
        experts = f"{sum(config.experts.layers)} layers of {config.experts.count} experts"
        raise CheckpointError(f"{origin}: {experts}, but only {len(stored)} tensors")


@contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """A progress bar of bytes on stderr, gone when done; nothing at all where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensor to shard, a file name in the same folder."""
    try:
        weight_map = json.loads(read_regular(index, _MAX_HEADER_BYTES))["weight_map"]
        # An index is part of a download: it must not name files outside its folder.
        if all(shard == Path(shard).name for shard in weight_map.values()):
            return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{index}: no weight_map from tensor names to file names of this folder")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, after the safetensors library has found header, offsets and file size in order."""
    with file_errors(file):
        try:
            with open_regular(file) as regular, safe_open(path_of(regular), framework="np") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not iterable itself)
                return {
                    name: StoredTensor(file, name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()
                }
        except SafetensorError as error:
            size, expected = file.stat().st_size, _promised_bytes(file)
            if expected is not None and size < expected:
                raise CheckpointError(f"{file}: cut short: expected {expected} bytes, got {size}") from None
            raise CheckpointError(f"{file}: not a safetensors file: {printable(error)}") from None
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _promised_bytes(file: Path) -> int | None:
    """The size that a safetensors file should have by its own header, None where that cannot be told.

    The format is the header's length in 8 bytes, little endian; the header in JSON; the tensors.
    """
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            return None
        header = opened.read(length)
    if not header.startswith(b"{"):
        return None
    if len(header) < length:
        return 8 + length
    try:
        entries: dict[str, dict[str, Any]] = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        last = max(ends, default=0)
        return 8 + length + last if isinstance(last, int) else None  # JSON's numbers may be infinite
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


def _map(file: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """The bytes of each tensor of a file whose header is in order, in its memory map: private and writable, since MAX
    copies what is read-only.
    """
    with open_regular(file) as opened:
        mapped = np.frombuffer(mmap(opened.fileno(), 0, access=ACCESS_COPY), np.uint8)
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: mapped[start + first : start + end] for name, (first, end) in places.items()}


def stored_values(stored: StoredTensor) -> np.ndarray:
    """A whole tensor, of float8 too, which the safetensors library does not give to NumPy."""
    if stored.dtype not in FLOAT8:
        with safe_open(stored.file, framework="np", backend="pread") as opened:
            values: np.ndarray = opened.get_tensor(stored.name)
        return values
    with open_regular(stored.file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        first, end = json.loads(opened.read(length))[stored.name]["data_offsets"]
        opened.seek(8 + length + first)
        return np.frombuffer(opened.read(end - first), FLOAT8[stored.dtype]).reshape(stored.shape)


def _copy(stored: StoredTensor, dtype: DType) -> np.ndarray:
    """The tensor in memory of its own, rounded to `dtype`. The file is read by blocks and not mapped meanwhile."""
    result = np.empty(stored.shape, numpy_dtype(dtype))
    row_bytes = math.prod(stored.shape[1:]) * DTYPES[stored.dtype].size_in_bytes
    rows = max(1, _BLOCK_BYTES // row_bytes)
    # A float16 that overflows to infinity is what the cast means: no warning.
    with safe_open(stored.file, framework="np", backend="pread") as opened, np.errstate(over="ignore"):
        source = opened.get_slice(stored.name)
        for start in range(0, stored.shape[0], rows):
            stop = min(start + rows, stored.shape[0])
            result[start:stop] = source[start:stop]
    return result
