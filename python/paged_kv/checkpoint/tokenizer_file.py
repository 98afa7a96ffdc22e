"""Reads a checkpoint's `tokenizer.json` with the `tokenizers` library, whose errors are of no type of their own."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.tokenizer_limits import LONGEST_TOKEN, check_file, check_made
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 512 << 20
"""The library reads the whole file into memory; the largest real ones have some 40 MB."""


def read_tokenizer(file: Path, vocab_size: int | None = None) -> tokenizers.Tokenizer:
    """The tokenizer that `file` describes, for a model with embeddings of `vocab_size` tokens.

    Raises:
        CheckpointError: there is no such file, it is no tokenizer, it makes too much of a text, or it has tokens that
            the model has no embedding for.
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
        if vocab_size is not None:
            check_vocabulary(tokenizer, file, vocab_size)
        return tokenizer


def check_vocabulary(tokenizer: tokenizers.Tokenizer, file: Path, vocab_size: int) -> None:
    """Refuses a tokenizer with tokens that a model with embeddings of `vocab_size` tokens has none for.

    Raises:
        CheckpointError: it has such a token, or a very long one.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest, longest = max(vocabulary.values(), default=-1), max(map(len, vocabulary), default=0)
    if longest > LONGEST_TOKEN:
        raise CheckpointError(f"{file}: a token has {longest} characters, expected at most {LONGEST_TOKEN}")
    if largest >= vocab_size:
        raise CheckpointError(
            f"{file}: vocabulary mismatch: token ids go up to {largest}, but vocab_size is {vocab_size} in config.json"
        )
