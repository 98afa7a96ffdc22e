"""A model on disk, whatever its format: a Hugging Face folder with safetensors, or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from max.dtype import DType
from max.graph import DeviceRef

from paged_kv.checkpoint.config import checkpoint_folder, load_config, load_sampling
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf import Dequantise, GgufCheckpoint, find_gguf, open_gguf
from paged_kv.checkpoint.gguf_tokenizer import has_vocabulary, make_tokenizer
from paged_kv.checkpoint.hub import located
from paged_kv.checkpoint.packing import read_packing
from paged_kv.checkpoint.tokenizer_file import TOKENIZER, check_vocabulary, read_tokenizer
from paged_kv.checkpoint.weights import Checkpoint, OnProgress, check_layers, open_checkpoint
from paged_kv.graphs.models import find_family
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields


@dataclass(frozen=True)
class Source:
    """A model's configuration and its weights, which are not read before `load`."""

    folder: Path
    """Its folder, where its tokenizer lies too."""
    config: DecoderConfig
    checkpoint: Checkpoint | GgufCheckpoint
    reader: Callable[[Path], tokenizers.Tokenizer] = field(default=read_tokenizer, repr=False, compare=False)
    """Reads tokenizer.json, which takes a second where it is large: a folder's configuration may have read it."""

    def tokenizer(self) -> tuple[tokenizers.Tokenizer, Path]:
        """The folder's tokenizer.json; of a GGUF file without one, a tokenizer of its vocabulary. And the file that it
        comes from.

        Raises:
            CheckpointError: there is neither, or what is there is no tokenizer.
        """
        file = self.folder / TOKENIZER
        if isinstance(self.checkpoint, GgufCheckpoint) and not file.exists():
            header = self.checkpoint.header
            if has_vocabulary(header):
                return make_tokenizer(header), header.file
        tokenizer = self.reader(file)
        check_vocabulary(tokenizer, file, self.config.vocab_size)
        return tokenizer, file

    def sampling(self, readable: Mapping[str, tuple[str, float, float]]) -> dict[str, float]:
        """Return how tokens are chosen where a request does not say it: as `load_sampling`; GGUF has no words for it.

        Raises:
            CheckpointError: a value of the folder's generation_config.json is bad.
        """
        return {} if isinstance(self.checkpoint, GgufCheckpoint) else load_sampling(self.folder, readable)

    def on(self, device: DeviceRef) -> Source:
        """The model as it runs on a device: GPUs multiply no blocks, so a folder's packed layers are dequantised."""
        if not device.is_gpu() or isinstance(self.checkpoint, GgufCheckpoint) or self.checkpoint.packing is None:
            return self
        return replace(self, config=replace(self.config, encodings=()))

    def layer_names(self) -> dict[str, str]:
        """Names that layers have in a folder's files, and the step's where it has others; none of a GGUF file."""
        if isinstance(self.checkpoint, GgufCheckpoint):
            return {}
        tensors = self.checkpoint.tensors.items()
        names = {stored.name.removesuffix(".weight"): name.removesuffix(".weight") for name, stored in tensors}
        return {theirs: ours for theirs, ours in names.items() if theirs != ours}

    def load(
        self, dtype: DType, progress: OnProgress | None = None, dequantise: Dequantise | None = None
    ) -> dict[str, np.ndarray]:
        """Every weight of the model as an array, by the name that the step has for it.

        Those that are quantised stay in their blocks. The others are of `dtype`, and float32 beside quantised ones.

        Args:
            dequantise: As `GgufCheckpoint.load`.

        Raises:
            CheckpointError: the weights are not those of the configuration.
        """
        dtype = self.config.computed_in(dtype)
        if isinstance(self.checkpoint, GgufCheckpoint):
            return self.checkpoint.load(self.config, dtype, progress, dequantise)
        return self.checkpoint.load(self.config, dtype, progress)


def open_source(path: Path | str) -> Source:
    """The model that `path` is: a GGUF file, a folder with one and without safetensors, a Hugging Face folder, or the
    name of a hub's model, `org/name` or `org/name:Q4_K_M`, which is downloaded where the hub's cache lacks it.

    Raises:
        ContractTypeError: it is no path.
        CheckpointError: there is no such model, or none that this package runs.
    """
    path = located(path)
    with file_errors(path):
        has_safetensors = path.is_dir() and any(path.glob("*.safetensors"))
        file = None if has_safetensors else find_gguf(path)
        if file is None:
            reader = cache(read_tokenizer)
            config = load_config(checkpoint_folder(path), reader)
            source = source_of(config, Fields.read(path / "config.json"), open_checkpoint(path))
            return replace(source, reader=reader)
        return gguf_source(file)


def gguf_source(file: Path) -> Source:
    """The model in a GGUF file.

    Raises:
        CheckpointError: there is none that this package runs.
    """
    with file_errors(file):
        gguf = open_gguf(file)
        return Source(file.parent, gguf.config, gguf)


def source_of(config: DecoderConfig, fields: Fields, checkpoint: Checkpoint) -> Source:
    """The model of a Hugging Face checkpoint; `fields` are those of the config.json that `config` was read from.

    Raises:
        CheckpointError: there are fewer tensors than layers.
    """
    with file_errors(checkpoint.folder):
        checkpoint = replace(checkpoint.named_for(find_family(fields)), packing=read_packing(fields))
        check_layers(config, checkpoint.tensors, checkpoint.folder)
        if config.tie_word_embeddings and checkpoint.has_own_head():
            config = replace(config, tie_word_embeddings=False)
        encodings = config.encodings + checkpoint.encodings(config)
        return Source(checkpoint.folder, replace(config, encodings=encodings), checkpoint)
