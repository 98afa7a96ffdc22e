"""LoRA adapters in: folders of PEFT, and GGUF files of llama.cpp's converter.

An adapter is read whole: for each layer that it changes A `[rank, in]` and B `[out, rank]`, its scale multiplied into
B. What it asks for beyond that (trained embeddings, biases, magnitudes, whole layers) is refused by its name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import printable
from paged_kv.checkpoint.config import checkpoint_path
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf import GgufCheckpoint, rows_of_halves
from paged_kv.checkpoint.gguf_families import find_family
from paged_kv.checkpoint.gguf_header import read_header
from paged_kv.checkpoint.weights import StoredTensor, open_files
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.adapters import adaptable_layers
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1024
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_TEXT_OF_IMAGES = ("model.language_model.", "language_model.model.", "language_model.")
"""The beginnings of the names of a text model's layers inside a model that takes images too."""
_UNSUPPORTED = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices"),
    *("layer_replication", "use_qalora", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
)
"""Keys of PEFT's configuration that say that the adapter is more than A and B, unless they are empty."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways of beginning to train an adapter that leave the model's own weights as they are."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as it is read."""

    origin: Path
    layers: Mapping[str, tuple[Floats, Floats]]
    """By the step's names of layers: A `[rank, in]`, and B `[out, rank]` times the adapter's scale."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        digest = hashlib.sha256()
        for layer, pair in sorted(self.layers.items()):
            for matrix in pair:
                digest.update(f"{layer} {matrix.shape}".encode())
                digest.update(matrix.tobytes())
        return digest.hexdigest()


def read_adapter(path: Path | str, config: DecoderConfig, names: Mapping[str, str] | None = None) -> AdapterWeights:
    """The adapter that `path` is: a folder with PEFT's `adapter_config.json`, or a GGUF file.

    Args:
        path: The folder or the file.
        config: The model that it is for.
        names: Names that layers have in the model's own files, and the step's.

    Raises:
        CheckpointError: there is none; it was made for a model of other sizes; it changes what no adapter may change
            here. The message names the file, and the key or the tensor.
    """
    path = checkpoint_path(path)
    with file_errors(path):
        if path.is_dir():
            layers = dict(_read_peft(path, config, names or {}))
        elif path.suffix == ".gguf":
            layers = dict(_read_gguf(path, config))
        else:
            raise CheckpointError(f"{path}: expected a folder with {CONFIG_FILE} or a GGUF file")
        if not layers:
            raise CheckpointError(f"{path}: the adapter has no layers")
        return AdapterWeights(path, layers)


def _read_peft(
    folder: Path, config: DecoderConfig, names: Mapping[str, str]
) -> Iterator[tuple[str, tuple[Floats, Floats]]]:
    fields = Fields.read(folder / CONFIG_FILE)
    if fields.get("peft_type") != "LORA":
        raise fields.error("peft_type", 'expected "LORA"')
    for key in _UNSUPPORTED:
        if fields.get(key) not in (None, False, [], {}):
            raise fields.error(key, "not supported: an adapter changes linear layers by A and B alone")
    if fields.get("bias") not in (None, "none"):
        raise fields.error("bias", 'expected "none"')
    if fields.get("init_lora_weights") not in (None, *_PLAIN_STARTS):
        raise fields.error("init_lora_weights", "expected an adapter that leaves the model's own weights as they are")
    alphas = _Alphas.read(fields)
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{folder}: {WEIGHTS_FILE} is missing")
    adapter = open_files([folder / WEIGHTS_FILE])
    sizes = adaptable_layers(config)
    pairs: dict[str, dict[str, StoredTensor]] = {}
    theirs: dict[str, str] = {}
    for name, stored in adapter.tensors.items():
        match = _TENSOR.fullmatch(name)
        layer = None if match is None else _step_name(match[1], names, sizes)
        if match is None or layer is None:
            problem = "no linear layer of the model's decoder: an adapter changes these alone"
            raise CheckpointError(f"{stored.file}: tensor {printable(name)}: {problem}")
        pairs.setdefault(layer, {})[match[2]] = stored
        theirs[layer] = match[1]
    for layer, pair in pairs.items():
        if len(pair) < 2:
            (one,) = pair.values()
            raise CheckpointError(f"{one.file}: tensor {printable(one.name)}: its other half is missing")
        a, b = pair["A"], pair["B"]
        rank = _rank(f"{a.file}: tensor {printable(a.name)}", a.shape, b.shape, sizes[layer])
        a_values, b_values = (adapter.load_tensor(stored.name, stored.shape) for stored in (a, b))
        yield layer, (a_values, b_values * np.float32(alphas.scale(theirs[layer], rank)))


def _step_name(name: str, names: Mapping[str, str], sizes: Mapping[str, tuple[int, int]]) -> str | None:
    """The step's name of a layer that PEFT calls `name`; None where no adapter may change it."""
    shorter = [f"model.{name.removeprefix(start)}" for start in _TEXT_OF_IMAGES if name.startswith(start)]
    return next((each for each in (names.get(name), name, *shorter) if each in sizes), None)


@dataclass(frozen=True)
class _Alphas:
    """By what A and B are multiplied: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, "A Rank Stabilization
    Scaling Factor for Fine-Tuning with LoRA").
    """

    usual: float
    of_layers: Mapping[str, float]
    by_root: bool

    @staticmethod
    def read(fields: Fields) -> _Alphas:
        patterns = fields.section("alpha_pattern")
        of_layers = {}
        for name in () if patterns is None else patterns.values:
            plain = name.removeprefix("^")
            if not re.fullmatch(r"[\w.]+", plain):
                raise CheckpointError(f"{fields.file}: alpha_pattern: expected names of layers, got {printable(name)}")
            of_layers[plain] = patterns.number(name) if patterns is not None else 0.0
        return _Alphas(fields.number("lora_alpha"), of_layers, fields.boolean("use_rslora"))

    def scale(self, layer: str, rank: int) -> float:
        """The first pattern that is a layer's name, or the end of it, counts."""
        own = (alpha for name, alpha in self.of_layers.items() if layer == name or layer.endswith(f".{name}"))
        return next(own, self.usual) / (math.sqrt(rank) if self.by_root else rank)


def _read_gguf(file: Path, config: DecoderConfig) -> Iterator[tuple[str, tuple[Floats, Floats]]]:
    header = read_header(file)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if header.metadata.get(key) != expected:
            raise CheckpointError(f"{file}: {key}: expected {expected}, got {printable(header.metadata.get(key))}")
    alpha = header.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise CheckpointError(f"{file}: adapter.lora.alpha: expected a number, got {printable(alpha)}")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise CheckpointError(f"{file}: adapter.alora.invocation_tokens: not supported: an adapter sees every token")
    adapter, family, rest = GgufCheckpoint(header), find_family(header), set(header.tensors)
    for layer, (rows, columns) in adaptable_layers(config).items():
        if config.is_recurrent(int(layer.split(".")[2])):  # the converter may have reordered its heads
            continue
        try:
            stem = family.tensor(f"{layer}.weight")
        except KeyError:
            continue
        halves = [f"{stem}.lora_{half}" for half in "ab"]
        if not rest & set(halves):
            continue
        rest -= set(halves)
        missing = next((name for name in halves if name not in header.tensors), None)
        if missing is not None:
            raise CheckpointError(f"{file}: tensor {printable(missing)} is missing")
        a, b = (adapter.load_tensor(name, (-1, -1)) for name in halves)
        rank = _rank(f"{file}: tensor {stem}", a.shape, b.shape, (rows, columns))
        if family.rotates_neighbours and layer.endswith((".q_proj", ".k_proj")):
            b = rows_of_halves(b, config.head_dim)
        yield layer, (a, b * np.float32(alpha / rank))
    if rest:
        problem = "no linear layer of the model's decoder: an adapter changes these alone"
        raise CheckpointError(f"{file}: tensor {printable(min(rest))}: {problem}")


def _rank(origin: str, a: tuple[int, ...], b: tuple[int, ...], size: tuple[int, int]) -> int:
    """The rank of A and B, whose shapes are held against the size `[out, in]` of their layer's weight."""
    rows, columns = size
    rank = a[0] if a else 0
    if a != (rank, columns) or b != (rows, rank) or not 1 <= rank <= MAX_RANK:
        expected = f"A [rank, {columns}] and B [{rows}, rank] of a rank from 1 to {MAX_RANK}"
        raise CheckpointError(f"{origin}: expected {expected}, got {list(a)} and {list(b)}")
    return rank
