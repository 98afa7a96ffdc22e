"""Layers that draft tokens from a model's hidden states: those of its own checkpoint (multi-token prediction), and
EAGLE-3 heads, which are small checkpoints of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from max.dtype import DType

from paged_kv.checkpoint.config import checkpoint_folder, checkpoint_path
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf import Dequantise, GgufCheckpoint
from paged_kv.checkpoint.gguf_families import find_family as find_gguf_family
from paged_kv.checkpoint.source import Source
from paged_kv.checkpoint.weights import Checkpoint, open_checkpoint, stored_values
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.graphs.models import find_family, llama
from paged_kv.graphs.models.config import DecoderConfig, DraftHead
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.tensors import expected_tensors

MTP = "mtp"
"""The `speculate` of a model's own draft layer."""
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""The architectures of EAGLE-3 heads."""
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QWEN = {
    "layers.0.": "model.layers.0.",
    "fc.": "model.eh_proj.",
    "norm.": "model.norm.",
    "pre_fc_norm_embedding.": "model.enorm.",
    "pre_fc_norm_hidden.": "model.hnorm.",
    "embed_tokens.": "model.embed_tokens.",
}
"""Beginnings of names after `mtp.`, and the step's."""
_NEXTN = {
    "shared_head.norm.": "model.norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "model.embed_tokens.",
    "enorm.": "model.enorm.",
    "hnorm.": "model.hnorm.",
    "eh_proj.": "model.eh_proj.",
    "": "model.layers.0.",
}
"""The same after the layer's name, of DeepSeek and GLM."""
_GGUF = {
    "nextn.shared_head_norm.": "output_norm.",
    "nextn.shared_head_head.": "output.",
    "nextn.embed_tokens.": "token_embd.",
    "nextn.": "nextn_",
    "": "blk.0.",
}
"""The same of GGUF."""
_EAGLE = {
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "fc.": "model.fc.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
    "lm_head.": "lm_head.",
}


@dataclass(frozen=True)
class DraftSource:
    """A draft layer's configuration and its weights, which are not read before `load`."""

    config: DecoderConfig
    """One layer, with `draft_head`."""
    checkpoint: Checkpoint | GgufCheckpoint
    tokens: np.ndarray | None = None
    """The model's token of each of the layer's tokens, `[config.draft_head.vocab_size]`; None where they are the
    same.
    """

    @property
    def head(self) -> DraftHead:
        """What makes it a draft layer."""
        assert self.config.draft_head is not None
        return self.config.draft_head

    def load(self, dtype: DType, of_model: Mapping[str, np.ndarray], dequantise: Dequantise) -> dict[str, np.ndarray]:
        """Every weight of the layer by the step's names; those that it shares are arrays of the model. `dequantise` is
        as of `GgufCheckpoint.load`.

        Raises:
            CheckpointError: the weights are not those of the configuration.
        """
        weights = Source(Path(), self.config, self.checkpoint).load(dtype, dequantise=dequantise)
        return weights | {name: of_model[name] for name in self.head.shared}


def draft_source(speculate: object, source: Source) -> DraftSource | None:
    """The draft layer that an option `speculate` names: "mtp", or the folder of an EAGLE-3 head; None where it names
    anything else. Raises as `mtp_source` and `eagle_source`.
    """
    if speculate == MTP:
        return mtp_source(source)
    if isinstance(speculate, str | Path) and is_eagle(speculate):
        return eagle_source(speculate, source)
    return None


def mtp_source(source: Source) -> DraftSource:
    """The first layer of multi-token prediction of a model's checkpoint.

    Raises:
        CheckpointError: its files cannot be read.
        ContractError: it has none that this package runs.
    """
    model = source.config
    if isinstance(source.checkpoint, GgufCheckpoint):
        checkpoint, stored = _mtp_of_gguf(source.checkpoint, model.num_hidden_layers)
    else:
        checkpoint = _mtp_of_folder(source, source.checkpoint)
        stored = set(checkpoint.tensors)
    if "model.eh_proj.weight" not in stored:
        problem = f"expected a checkpoint with an MTP layer for {MTP!r}, got none in {source.folder}"
        raise ContractError(f"speculate: {problem}")
    experts = None if model.experts is None else replace(model.experts, layers=(True,))
    head = DraftHead(kind="mtp", vocab_size=model.vocab_size, feeds_normed=model.recurrence is not None)
    own = replace(model, num_hidden_layers=1, recurrence=None, experts=experts, windows=(), rotates=(), draft_layers=0)
    is_tied = model.tie_word_embeddings and _HEAD not in stored
    own = replace(own, encodings=(), draft_head=head, tie_word_embeddings=is_tied)
    return DraftSource(_sharing(own, model, checkpoint, stored), checkpoint)


def is_eagle(path: Path | str) -> bool:
    """Return whether a path is the folder of an EAGLE-3 head. Raises as `checkpoint_path`."""
    file = checkpoint_path(path) / "config.json"
    if not os.path.isfile(file):  # unlike Path.is_file, no error for a name that is too long
        return False
    names = Fields.read(file).get("architectures")
    return isinstance(names, list) and any(name in EAGLE3 for name in names)


def eagle_source(path: Path | str, source: Source) -> DraftSource:
    """The EAGLE-3 head of a model in a folder with `config.json` and safetensors.

    Raises:
        CheckpointError: there is none, or its configuration is wrong.
        ContractError: it is the head of a model of other sizes.
    """
    folder, model = checkpoint_folder(path), source.config
    fields = Fields.read(folder / "config.json")
    with file_errors(fields.file):
        config = llama.read(Fields(fields.file, {**fields.values, "num_hidden_layers": 1}))
        vocab_size = fields.integer("draft_vocab_size", default=config.vocab_size)
        hidden = fields.integer("target_hidden_size", default=config.hidden_size)
        adds_normed = fields.boolean("norm_before_residual")
    sizes = {"vocab_size": (config.vocab_size, model.vocab_size), "hidden_size": (hidden, model.hidden_size)}
    for key, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise ContractError(f"speculate: {key} of the EAGLE-3 head: expected the model's {theirs}, got {ours}")
    with file_errors(fields.file):
        layers = _eagle_layers(fields, model)
    opened = open_checkpoint(folder)
    tensors = {_renamed(name, _EAGLE): stored for name, stored in opened.tensors.items()}
    tokens = None
    if "d2t" in tensors:
        shift = stored_values(tensors.pop("d2t"))
        tokens = np.arange(vocab_size) + shift if shift.shape == (vocab_size,) and shift.dtype.kind == "i" else None
        if tokens is None or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= model.vocab_size:
            raise CheckpointError(f"{folder}: d2t: expected {vocab_size} distances to tokens of the model")
    elif vocab_size != model.vocab_size:
        raise CheckpointError(f"{folder}: tensor d2t is missing")
    tensors.pop("t2d", None)
    head = DraftHead(
        kind="eagle3", vocab_size=vocab_size, adds_normed=adds_normed, layers=layers, model_hidden=model.hidden_size
    )
    checkpoint = replace(opened, tensors=tensors)
    config = replace(config, tie_word_embeddings=False, draft_head=head, float32_activations=model.float32_activations)
    return DraftSource(_sharing(config, model, checkpoint, set(tensors)), checkpoint, tokens)


def _mtp_of_gguf(checkpoint: GgufCheckpoint, layer: int) -> tuple[Checkpoint | GgufCheckpoint, set[str]]:
    """The tensors of an MTP layer by GGUF's names of a first layer, and the step's names of those that matter here."""
    at, header = f"blk.{layer}.", checkpoint.header
    of_layer = {name.removeprefix(at): tensor for name, tensor in header.tensors.items() if name.startswith(at)}
    tensors = {_renamed(name, _GGUF): tensor for name, tensor in of_layer.items()}
    tensors = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    names = ("model.eh_proj.weight", _EMBEDDINGS, _HEAD)
    stored = {name for name in names if find_gguf_family(header).tensor(name) in tensors}
    return GgufCheckpoint(replace(header, tensors=tensors)), stored


def _mtp_of_folder(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of an MTP layer by the step's names."""
    family = find_family(Fields.read(source.folder / "config.json"))
    starts = {f"model.layers.{source.config.num_hidden_layers}.": _NEXTN, "mtp.": _QWEN, "model.mtp.": _QWEN}
    tensors = {}
    for name, stored in open_checkpoint(source.folder).tensors.items():
        for start, names in starts.items():
            if name.startswith(start):
                name = _renamed(name.removeprefix(start), names)
                for theirs, ours in family.renames.items():
                    name = name.replace(theirs, ours, 1)
                tensors[name] = stored
                break
    return replace(checkpoint, tensors=tensors)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A name with the first of these beginnings that it has replaced."""
    start = next((start for start in names if name.startswith(start)), None)
    return name if start is None else names[start] + name.removeprefix(start)


def _eagle_layers(fields: Fields, model: DecoderConfig) -> tuple[int, ...]:
    """The layers of the model whose inputs an EAGLE-3 head takes."""
    count = model.num_hidden_layers
    section = fields.section("eagle_config") or fields
    key = "eagle_aux_hidden_state_layer_ids"
    layers = section.get(key) or [2, count // 2, count - 3]
    valid = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not valid or not all(0 < layer <= model.last_writing_layer for layer in layers):
        raise section.error(key, f"expected layers from 1 to {model.last_writing_layer} of the model", layers)
    return tuple(layers)


def _sharing(
    config: DecoderConfig, model: DecoderConfig, checkpoint: Checkpoint | GgufCheckpoint, stored: set[str]
) -> DecoderConfig:
    """The configuration with what the layer's checkpoint lacks shared, and with its encodings."""
    assert config.draft_head is not None
    shared = tuple(name for name in (_EMBEDDINGS, _HEAD) if name not in stored and name in expected_tensors(config))
    if _HEAD in shared and model.tie_word_embeddings:
        raise ContractError("speculate: the EAGLE-3 head lacks lm_head.weight, and the model's is its embeddings")
    config = replace(config, draft_head=replace(config.draft_head, shared=shared))
    of_model = tuple(each for each in model.encodings if each[0] in shared)
    return replace(config, encodings=(*checkpoint.encodings(config), *of_model))
