"""Reads a Hugging Face folder's `config.json`, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_kv.errors import CheckpointError
from paged_kv.graphs.models import find_family
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields


def checkpoint_folder(folder: Path | str) -> Path:
    """`folder` as a path.

    Raises:
        CheckpointError: it is no folder.
    """
    path = Path(folder)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    return path


def load_config(folder: Path | str) -> DecoderConfig:
    """The model that a folder's `config.json` describes, with the end-of-sequence tokens of `generation_config.json`.

    Raises:
        CheckpointError: the folder or the file is missing, or a field is missing, of a wrong type or of a value
            that this package does not run. The message names file, key and value.
    """
    fields = Fields.read(checkpoint_folder(folder) / "config.json")
    config = find_family(fields).read(fields)
    generation_file = fields.file.with_name("generation_config.json")
    if generation_file.is_file():
        generation = Fields.read(generation_file)
        if generation.get("eos_token_id") is not None:
            return replace(config, eos_token_ids=generation.tokens("eos_token_id", config.vocab_size))
    return config


def config_of(values: Mapping[str, Any], origin: Path | str) -> DecoderConfig:
    """The model that the contents of a `config.json` describe; `origin` is where they come from, for errors.

    Raises:
        CheckpointError: as `load_config` does.
    """
    fields = Fields(Path(origin), values)
    return find_family(fields).read(fields)
