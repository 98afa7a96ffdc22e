"""Find a model's chat templates and the names of its special tokens, in its folder or in its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.gguf_header import Strings
from paged_kv.checkpoint.source import Source
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular

DEFAULT, TOOL_USE = "default", "tool_use"
_MOST_BYTES = 64 << 20
"""The most bytes of one of these files; the largest real tokenizer_config.json have some 200 KB."""
_CONFIG, _TOKENS, _ALONE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
_FURTHER = "additional_chat_templates"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_IN_GGUF = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def read_templates(source: Source) -> dict[str, str]:
    """The chat templates by name; none where the model has none.

    A folder's files come first, as they do for the tokenizer: `chat_template.jinja` with `additional_chat_templates/`,
    then `tokenizer_config.json`; then a GGUF file's `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    folder, templates = source.folder, {}
    with file_errors(f"{folder}: its chat templates"):
        if (folder / _ALONE).is_file():
            templates[DEFAULT] = _text(folder / _ALONE)
        if (folder / _FURTHER).is_dir():
            templates |= {file.stem: _text(file) for file in sorted((folder / _FURTHER).glob("*.jinja"))}
        return templates or _of_config(folder / _CONFIG) or _of_gguf(source)


def read_names(source: Source) -> dict[str, str]:
    """The special tokens that a template may name: `bos_token` and so on, and those that the model's own files add.

    Raises:
        CheckpointError: a file cannot be read.
    """
    with file_errors(f"{source.folder}: its special tokens"):
        return _names(source)


def _names(source: Source) -> dict[str, str]:
    config = _json(source.folder / _CONFIG)
    values = _gguf_names(source) | _json(source.folder / _TOKENS) | config
    own = [name for name in config if name.endswith("_token")]
    names = {name: token for name in (*_NAMES, *own) if (token := _token(values.get(name)))}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            names |= {name: token for name, value in config[key].items() if (token := _token(value))}
    return names


def _of_config(file: Path) -> dict[str, str]:
    """Templates of a tokenizer_config.json: a text, or a list of objects with names and texts."""
    value = _json(file).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    each = value if isinstance(value, list) else [value]
    templates: dict[str, str] = {}
    for one in each:
        name, template = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            expected = "a text, or a list of objects with a name and a template"
            raise CheckpointError(f"{file}: chat_template: expected {expected}, got {printable(shown(one))}")
        templates[name] = template
    return templates


def _of_gguf(source: Source) -> dict[str, str]:
    if not isinstance(source.checkpoint, GgufCheckpoint):
        return {}
    key, metadata = "tokenizer.chat_template", source.checkpoint.header.metadata
    templates = {DEFAULT: metadata[key]} if isinstance(metadata.get(key), str) else {}
    for name, value in metadata.items():
        if name.startswith(key + ".") and isinstance(value, str):
            templates[name.removeprefix(key + ".")] = value
    return templates


def _gguf_names(source: Source) -> dict[str, Any]:
    if not isinstance(source.checkpoint, GgufCheckpoint):
        return {}
    metadata = source.checkpoint.header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = tokens.all if isinstance(tokens, Strings) else []
    names = {}
    for name, key in _IN_GGUF.items():
        key = f"tokenizer.ggml.{key}_token_id"
        token = metadata.get(key)
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool):
            file = source.checkpoint.header.file
            raise CheckpointError(f"{file}: {key}: expected a token id, got {printable(shown(token))}")
        if 0 <= token < len(texts):
            names[name] = texts[token].decode(errors="replace")
    return names


def _token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _text(file: Path) -> str:
    try:
        return read_regular(file, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {printable(error)}") from None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: invalid JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {printable(shown(value))}")
    return value
