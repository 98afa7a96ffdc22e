"""The folder that transformers and MAX's server want beside a GGUF file: config.json and the tokenizer's files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.gguf_families import hugging_face_config
from paged_kv.checkpoint.gguf_tokenizer import has_vocabulary, tokenizer_json
from paged_kv.checkpoint.tokenizer_file import TOKENIZER, read_tokenizer
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models import FAMILIES

TOKENIZER_CONFIG = "tokenizer_config.json"
_KEPT = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def model_folder(checkpoint: GgufCheckpoint, cache: Path) -> Path:
    """The GGUF file's own folder where that has what is wanted; else one in `cache`, made of the file's metadata and
    vocabulary, and of links to what lies beside the file.

    Raises:
        CheckpointError: there is no tokenizer.json beside the file, and no vocabulary in it that makes one; or the
            folder cannot be written.
    """
    file = checkpoint.header.file.absolute()  # a link keeps its name, and its neighbours
    own = file.parent
    if not (own / TOKENIZER).is_file() and not has_vocabulary(checkpoint.header):
        raise CheckpointError(f"{own / TOKENIZER}: no such file (the model's own tokenizer belongs beside its weights)")
    if all((own / name).is_file() for name in ("config.json", TOKENIZER, TOKENIZER_CONFIG)):
        return own
    statuses = [part.stat() for part in checkpoint.header.parts]
    facts = " ".join(f"{status.st_size} {status.st_mtime_ns}" for status in statuses)
    digest = hashlib.sha256(f"{file} {facts}".encode()).hexdigest()[:16]
    made = cache / f"{file.stem}-{digest}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as new:
            _fill(Path(new), own, checkpoint)
            made.mkdir(exist_ok=True)
            for written in Path(new).iterdir():  # each is replaced whole: a server may be reading it
                written.replace(made / written.name)
    except OSError as error:
        raise CheckpointError(f"{made}: cannot be written: {error}") from None
    return made


def _fill(folder: Path, own: Path, checkpoint: GgufCheckpoint) -> None:
    for name in _KEPT:
        if (own / name).is_file():
            os.symlink(own / name, folder / name)
    if not (own / TOKENIZER).is_file():
        (folder / TOKENIZER).write_text(tokenizer_json(checkpoint.header), encoding="utf-8")
    described = hugging_face_config(checkpoint.header)
    if (own / "config.json").is_file():
        os.symlink(own / "config.json", folder / "config.json")
    else:
        kind = FAMILIES[described["architectures"][0]].MODEL_TYPE
        (folder / "config.json").write_text(json.dumps(described | {"model_type": kind}, indent=2))
    if not (own / TOKENIZER_CONFIG).is_file():
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(_tokenizer_config(folder, checkpoint, described), indent=2))


def _tokenizer_config(folder: Path, checkpoint: GgufCheckpoint, described: dict[str, Any]) -> dict[str, Any]:
    """What the server needs of it: which tokens begin and end a text, and the chat template."""
    tokenizer = read_tokenizer(folder / TOKENIZER)
    values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    ends = described["eos_token_id"] or [None]
    for key, token in (("bos_token", described["bos_token_id"]), ("eos_token", ends[0])):
        if token is not None:
            values[key] = tokenizer.id_to_token(token)
    template = checkpoint.header.metadata.get("tokenizer.chat_template")
    return values if not isinstance(template, str) else values | {"chat_template": template}
