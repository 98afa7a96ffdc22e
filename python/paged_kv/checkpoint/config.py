"""Reads a Hugging Face folder's `config.json`, checked field by field."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from paged_kv.arguments import printable
from paged_kv.checkpoint.end_tokens import end_tokens
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.packing import read_packing
from paged_kv.checkpoint.tokenizer_file import TOKENIZER, read_tokenizer
from paged_kv.errors import CheckpointError, ContractTypeError
from paged_kv.graphs.models import find_family
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields


def checkpoint_path(path: Path | str) -> Path:
    """`path` as a path that can be looked at, whether something is there or not.

    Raises:
        ContractTypeError: it is no path.
        CheckpointError: the system refuses it: it is too long, has a NUL byte, leads in a circle, or may not be read.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ContractTypeError(f"path: expected a string or a pathlib.Path, got {type(path).__name__}")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a NUL byte, or what the system's encoding lacks
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{printable(path)}: cannot be read: {reason}") from None
    return Path(path)


def checkpoint_folder(folder: Path | str) -> Path:
    """`folder` as a path.

    Raises:
        ContractTypeError, CheckpointError: as `checkpoint_path`, or it is no folder.
    """
    path = checkpoint_path(folder)
    if not path.exists():
        raise CheckpointError(f"{printable(path)}: no such folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    return path


def load_config(folder: Path | str, read: Callable[[Path], tokenizers.Tokenizer] = read_tokenizer) -> DecoderConfig:
    """The model that a folder's `config.json` describes, with the end-of-sequence tokens of `generation_config.json`.

    Where there are none, those of `config.json` end a text, and those that `tokenizer.json` adds to its vocabulary and
    that are known by their texts.

    Args:
        folder: The checkpoint.
        read: Reads `tokenizer.json` where it is needed, as `read_tokenizer` does.

    Raises:
        CheckpointError: the folder or the file is missing, or a field is missing, of a wrong type or of a value
            that this package does not run. The message names file, key and value. Or `tokenizer.json` is no tokenizer.
    """
    fields = Fields.read(checkpoint_folder(folder) / "config.json")
    config = _read(fields)
    generation = _generation(fields.file.parent)
    with file_errors(generation.file):
        if generation.get("eos_token_id") is not None:
            return replace(config, eos_token_ids=generation.tokens("eos_token_id", config.vocab_size))
    tokenizer_file = fields.file.with_name(TOKENIZER)
    if not tokenizer_file.is_file():
        return config
    added = read(tokenizer_file).get_added_tokens_decoder()
    ids = {token.content: number for number, token in added.items() if number < config.vocab_size}
    return replace(config, eos_token_ids=end_tokens(ids, config.eos_token_ids))


def load_sampling(folder: Path, readable: Mapping[str, tuple[str, float, float]]) -> dict[str, float]:
    """Read the sampling defaults of a folder's `generation_config.json`: fields of `engine.Sampling` by name.

    With `do_sample: false`, only what greedy texts depend on.

    Args:
        folder: The checkpoint.
        known: Fields that are read: "number" or "integer", the least and the most.

    Raises:
        CheckpointError: a value is of a wrong type or out of range.
    """
    fields = _generation(folder)
    with file_errors(fields.file):
        return _sampling(fields, readable)


def _sampling(fields: Fields, readable: Mapping[str, tuple[str, float, float]]) -> dict[str, float]:
    sampling: dict[str, float] = {}
    for name, (kind, least, most) in readable.items():
        if fields.get(name) is None:
            continue
        if kind == "integer":
            sampling[name] = fields.integer(name, None, int(most), int(least))
        else:
            sampling[name] = fields.number(name, None, least, most)
    if not fields.boolean("do_sample", True):
        return {name: value for name, value in sampling.items() if name == "repetition_penalty"}
    return sampling


def _generation(folder: Path) -> Fields:
    file = folder / "generation_config.json"
    return Fields.read(file) if file.is_file() else Fields(file, {})


def config_of(values: Mapping[str, Any], origin: Path | str) -> DecoderConfig:
    """The model that the contents of a `config.json` describe; `origin` is where they come from, for errors.

    Raises:
        CheckpointError: as `load_config` does.
    """
    return _read(Fields(Path(origin), values))


def _read(fields: Fields) -> DecoderConfig:
    with file_errors(fields.file):
        if read_packing(fields) is not None:  # then it is the checkpoint's weights that are read in another way
            fields = replace(fields, values={k: v for k, v in fields.values.items() if k != "quantization_config"})
        return find_family(fields).config_of(fields)
