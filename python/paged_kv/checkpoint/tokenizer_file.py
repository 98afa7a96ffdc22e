"""Reads a checkpoint's `tokenizer.json` with the `tokenizers` library, whose errors are of no type of their own."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.tokenizer_limits import check_file, check_made
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 512 << 20
"""The library reads the whole file into memory; the largest real ones have some 40 MB."""


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer that `file` describes.

    Raises:
        CheckpointError: there is no such file, it is no tokenizer, or it makes too much of a text.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file (the model's own tokenizer belongs beside its weights)")
    with file_errors(f"{file}: not a tokenizer"):
        content = read_regular(file, _MAX_BYTES)
        check_file(content, file)
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # Some files carry the lengths of their training batches; a prompt is taken as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        check_made(tokenizer, file)
        return tokenizer
