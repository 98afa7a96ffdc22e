"""A known prefix as a file: its tokens, and K and V of its pages, which only the model that computed them can use.

A safetensors file with two tensors, `tokens` `[n * page_size]` int64 and `pages` `[n, ...]`, the bits of whole pages as
unsigned integers. Its metadata says what they are of; a reader compares all of it, and the SHA-256 of both tensors.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paged_kv.arguments import printable
from paged_kv.checkpoint.config import checkpoint_path
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.pool import PrefixCache

FORMAT = "paged-kv prefix 1"


Bits = npt.NDArray[Any]
"""Whole pages, `[n, ...]`, their elements as unsigned integers."""


class PagedModel(Protocol):
    """What of a model a file depends on (`model.DecoderModel`)."""

    page_size: int

    @property
    def digest(self) -> str:
        """SHA-256 of weights and geometry, in hexadecimal."""
        ...

    @property
    def page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The dtype of a page's elements, and its shape."""
        ...

    def read_pages(self, pages: Sequence[int]) -> Bits:
        """The bits of some pages."""
        ...

    def write_pages(self, pages: Sequence[int], bits: Bits) -> None:
        """Replaces some pages by what `read_pages` gave."""
        ...


def save_prefix(
    path: Path | str,
    model: PagedModel,
    prefixes: PrefixCache,
    request_id: Hashable,
    tokens: Sequence[int],
    namespace: Hashable,
) -> int:
    """Writes the known pages of a prompt; a request of that id holds them meanwhile. Returns their tokens.

    Raises:
        ContractError: nothing of the prompt is known.
        CheckpointError: as `write_prefix`.
    """
    count = prefixes.hold(request_id, tokens, namespace)
    try:
        if count == 0:
            raise ContractError("prompt: no page of it is in the cache")
        write_prefix(path, model, tokens[:count], prefixes.pool.pages(request_id))
    finally:
        prefixes.pool.free(request_id)
    return count


def load_prefix(
    path: Path | str, model: PagedModel, prefixes: PrefixCache, request_id: Hashable, namespace: Hashable
) -> int:
    """Reads a file into pages of the pool, where prompts find it; returns its tokens.

    Raises:
        PoolExhausted: too few pages are free or cached.
        CheckpointError: as `read_prefix`.
    """
    tokens, bits = read_prefix(path, model)
    pages = prefixes.pool.start(request_id, len(tokens))
    try:
        model.write_pages(pages, bits)
        prefixes.store(request_id, tokens, namespace)
    finally:
        prefixes.pool.free(request_id)
    return len(tokens)


def write_prefix(path: Path | str, model: PagedModel, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Writes the file, whole or not at all.

    Args:
        path: Of the file; one that is there is replaced.
        model: Has the pages.
        tokens: As many as the pages hold.
        pages: Full pages, in the order of the tokens.

    Raises:
        ContractTypeError: `path` is no path.
        CheckpointError: the file cannot be written.
    """
    target = checkpoint_path(path)
    tensors = {"tokens": np.array(tokens, np.int64), "pages": model.read_pages(pages)}
    metadata = _expected(model) | {"sha256": _digest(tensors["tokens"], tensors["pages"])}
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            made = Path(folder) / "prefix"
            save_file(tensors, made, metadata=metadata)
            os.replace(made, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{printable(target)}: cannot be written: {error}") from None


def read_prefix(path: Path | str, model: PagedModel) -> tuple[list[int], Bits]:
    """The tokens of a file, and the bits of their pages `[n, ...]`.

    Raises:
        ContractTypeError: `path` is no path.
        CheckpointError: the file cannot be read, is damaged, or is of another model, format or kind of page.
    """
    file = checkpoint_path(path)
    name = printable(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            for key, value in _expected(model).items():
                if metadata.get(key) != value:
                    found = printable(repr(metadata.get(key)))
                    raise CheckpointError(f"{name}: {key} is {found}, that of this model is {value!r}")
            if sorted(opened.keys()) != ["pages", "tokens"]:
                raise CheckpointError(f"{name}: holds other tensors than tokens and pages")
            tokens, pages = opened.get_tensor("tokens"), opened.get_tensor("pages")
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{name}: cannot be read: {printable(error)}") from None
    dtype, shape = model.page_kind
    bits = np.dtype(f"uint{8 * _itemsize(dtype)}")
    if tokens.dtype != np.int64 or tokens.shape != (len(pages) * model.page_size,):
        raise CheckpointError(f"{name}: {list(tokens.shape)} tokens of {tokens.dtype} for {len(pages)} pages")
    if pages.dtype != bits or pages.shape[1:] != shape:
        raise CheckpointError(f"{name}: pages are {pages.dtype} {list(pages.shape)}, expected {bits} [n, *{shape}]")
    if metadata.get("sha256") != _digest(tokens, pages):
        raise CheckpointError(f"{name}: is damaged: its content has another SHA-256 than it says")
    return tokens.tolist(), pages


def _expected(model: PagedModel) -> dict[str, str]:
    """What a file says of its pages, but for the digest of its content."""
    dtype, shape = model.page_kind
    return {
        "format": FORMAT,
        "model": model.digest,
        "dtype": dtype,
        "page_size": str(model.page_size),
        "page_shape": "x".join(map(str, shape)),
    }


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)


def _digest(tokens: npt.NDArray[Any], pages: Bits) -> str:
    found = hashlib.sha256(np.ascontiguousarray(tokens).data)
    found.update(np.ascontiguousarray(pages).data)
    return found.hexdigest()
