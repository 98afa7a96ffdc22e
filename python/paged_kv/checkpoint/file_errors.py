"""Turns any error of reading a model's file into a `CheckpointError` that names the file.

Readers check what can be wrong with a file. A hostile file may still be wrong in a way that no check expects, and
libraries raise errors of their own: these end here, at the entrances (configuration, headers, weights, tokenizer, chat
templates), and not as a traceback at the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_kv.arguments import printable
from paged_kv.errors import CheckpointError, PagedKVError


@contextmanager
def file_errors(problem: Path | str) -> Iterator[None]:
    """Raises any error inside as a `CheckpointError` that begins with `problem`: the file, and what of it.

    The error itself is the `__cause__`, so that a bug of this package can still be traced. Not converted: the package's
    own errors, `MemoryError`, and what ends a program (`KeyboardInterrupt`, `SystemExit`).

    The tokenizers library raises `Exception` itself, and where Rust code panics a subclass of `BaseException`.
    """
    try:
        yield
    except (PagedKVError, MemoryError):
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        explains_itself = is_panic or type(error) is Exception or isinstance(error, OSError | ValueError)
        reason = error if explains_itself else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{problem}: {printable(reason)}") from error
