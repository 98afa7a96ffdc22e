"""A known prefix as a file: its tokens, and K and V of its pages, which only the model that computed them can use.

A safetensors file with two tensors, `tokens` `[n * page_size]` int64 and `pages` `[n, ...]`, the bits of whole pages as
unsigned integers; of a hybrid model also `states` `[1, m]`, those of the state after the last token; where layers with
windows have pages of their own also `windows` `[w, ...]`, those that the token after them sees. Its metadata says
what they are of; a reader compares all of it, and the SHA-256 of the tensors, which tells damage. With a key it is an
HMAC of metadata and tensors instead, which tells who wrote it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from paged_kv.arguments import printable
from paged_kv.checkpoint.config import checkpoint_path
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, RequestError
from paged_kv.files import open_regular, path_of
from paged_kv.options import NO_PAGE
from paged_kv.pool import PrefixCache

FORMAT = "paged-kv prefix 1"
SHORTEST_KEY = 16
"""Bytes of a key."""
_PLAIN, _KEYED = "sha256", "hmac-sha256"
_REQUEST = ("file", 0)
"""The request that holds a file's pages while it is saved or loaded; one at a time."""

Bits = npt.NDArray[Any]
"""Whole pages or states, `[n, ...]`, their elements as unsigned integers."""


class BitsKind(NamedTuple):
    """The kind of `Bits`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """The shape of each of them."""

    def check(self, name: str, what: str, bits: Bits) -> None:
        """Refuses other bits; `name` is the file that has them.

        Raises:
            CheckpointError: their dtype or shape is another one.
        """
        if bits.dtype != self.dtype or bits.ndim != 1 + len(self.shape) or bits.shape[1:] != self.shape:
            found = f"{bits.dtype} {list(bits.shape)}, expected {self.dtype} [n, *{self.shape}]"
            raise CheckpointError(f"{name}: {what} are {found}")


class PagedModel(Protocol):
    """The part of a model that a file depends on (`model.DecoderModel`)."""

    page_size: int
    num_states: int
    """Slots of state; 0 where no layer is recurrent."""
    num_window_pages: int
    """Pages of the layers with windows; 0 where they have none of their own."""

    @property
    def digest(self) -> str:
        """SHA-256 of weights and geometry, in hexadecimal."""
        ...

    @property
    def kernels(self) -> str:
        """The kernels that computed the pages: other kernels round otherwise. Of the disk tier alone."""
        ...

    @property
    def page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The dtype of a page's elements, and its shape."""
        ...

    @property
    def window_page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The same of a page of the layers with windows."""
        ...

    def read_pages(self, pages: Sequence[int], *, windows: bool = False) -> Bits:
        """The bits of some pages, or of some of the layers with windows."""
        ...

    def write_pages(self, pages: Sequence[int], bits: Bits, *, windows: bool = False) -> None:
        """Replaces some pages by what `read_pages` gave."""
        ...

    @property
    def state_size(self) -> int:
        """Elements of a state, all float32."""
        ...

    def read_states(self, slots: Sequence[int]) -> Bits:
        """The bits of some slots of state."""
        ...

    def write_states(self, slots: Sequence[int], bits: Bits) -> None:
        """Replaces some slots of state by what `read_states` gave."""
        ...


def save_prefix(
    path: Path | str,
    model: PagedModel,
    prefixes: PrefixCache,
    tokens: Sequence[int],
    namespace: Hashable,
    key: bytes | None = None,
) -> int:
    """Writes the known pages of a prompt; returns their tokens.

    Raises:
        ContractError: nothing of the prompt is known.
        CheckpointError: as `write_prefix`.
    """
    with _own_request(prefixes):
        count = prefixes.hold(_REQUEST, tokens, namespace)
        if count == 0:
            raise ContractError("prompt: no page of it is in the cache")
        pool, windows = prefixes.pool, prefixes.windows
        seen = None
        if windows is not None:
            seen = windows.pool.pages(_REQUEST)[windows.seen(count // model.page_size).start :]
        write_prefix(path, model, tokens[:count], pool.pages(_REQUEST), key, pool.state(_REQUEST), seen)
    return count


def load_prefix(
    path: Path | str, model: PagedModel, prefixes: PrefixCache, namespace: Hashable, key: bytes | None = None
) -> int:
    """Reads a file into pages of the pool, where prompts find it; returns its tokens.

    Raises:
        PoolExhausted: too few pages are free or cached.
        CheckpointError: as `read_prefix`, or it has pages of other windows.
    """
    tokens, bits, more = read_prefix(path, model, key)
    state, of_windows, windows = more.get("states"), more.get("windows"), prefixes.windows
    with _own_request(prefixes):
        pages, states = prefixes.pool.start(_REQUEST, len(tokens)), {}
        if state is not None:
            slots = prefixes.pool.take_states(_REQUEST, 1)
            model.write_states(slots, state)
            states = {len(tokens): slots[0]}
        model.write_pages(pages, bits)
        if windows is not None and of_windows is not None:
            dropped = windows.seen(len(pages)).start
            if len(of_windows) != len(pages) - dropped:
                raise CheckpointError(f"{printable(path)}: has {len(of_windows)} pages of windows")
            windows.pool.start(_REQUEST, len(tokens), lambda _: [NO_PAGE] * dropped)
            model.write_pages(windows.pool.pages(_REQUEST)[dropped:], of_windows, windows=True)
        prefixes.store(_REQUEST, tokens, namespace, states=states)
    return len(tokens)


@contextmanager
def _own_request(prefixes: PrefixCache) -> Iterator[None]:
    """Frees the request that holds the pages of a file; before it too, where an exception kept it from that."""
    pools = [prefixes.pool, *(() if prefixes.windows is None else (prefixes.windows.pool,))]

    def free() -> None:
        for pool in pools:
            with suppress(RequestError):
                pool.free(_REQUEST)

    try:
        free()
        yield
    finally:
        free()


def write_prefix(
    path: Path | str,
    model: PagedModel,
    tokens: Sequence[int],
    pages: Sequence[int],
    key: bytes | None = None,
    state: int | None = None,
    windows: Sequence[int] | None = None,
) -> None:
    """Writes the file, whole or not at all.

    Args:
        path: The path of the file; one that is there is replaced.
        model: Has the pages.
        tokens: As many as the pages hold.
        pages: Full pages, in the order of the tokens.
        key: The key of the digest.
        state: The slot of the state after the tokens, of a hybrid model.
        windows: The pages of layers with windows that the token after them sees, where these have their own.

    Raises:
        ContractTypeError: `path` is no path.
        CheckpointError: the file cannot be written.
    """
    target = checkpoint_path(path)
    more = {} if state is None else {"states": model.read_states([state])}
    if windows is not None:
        more["windows"] = model.read_pages(windows, windows=True)
    tensors, metadata = _contents(tokens, model.read_pages(pages), expected(model), key, more)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            made = Path(folder) / "prefix"
            save_file(tensors, made, metadata=metadata)
            os.replace(made, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{printable(target)}: cannot be written: {error}") from None


def read_prefix(
    path: Path | str, model: PagedModel, key: bytes | None = None
) -> tuple[list[int], Bits, Mapping[str, Bits]]:
    """The tokens of a file, the bits of their pages `[n, ...]`, and those of its `states` and `windows` where the model
    has such.

    Raises:
        ContractTypeError: `path` is no path.
        CheckpointError: the file cannot be read, is damaged, or is of another model, format, kind of page or key.
    """
    file = checkpoint_path(path)
    name = printable(file)
    try:
        with open_regular(file) as regular, safe_open(path_of(regular), framework="numpy") as opened:
            metadata = opened.metadata() or {}
            kinds = {"states": state_bits(model)} if model.num_states else {}
            if model.num_window_pages:
                kinds["windows"] = page_bits(model, windows=True)
            _check_metadata(name, metadata, expected(model), opened.keys(), ("tokens", "pages", *kinds))
            tokens, pages = map(opened.get_tensor, ("tokens", "pages"))
            more = {kind: opened.get_tensor(kind) for kind in kinds}
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{name}: cannot be read: {printable(error)}") from None
    for kind, bits in more.items():
        kinds[kind].check(name, kind, bits)
    _check_tensors(name, metadata, tokens, pages, page_bits(model), model.page_size, expected(model), key, more)
    return tokens.tolist(), pages, more


def pack(tokens: npt.NDArray[np.int64], bits: Bits, said: Mapping[str, str]) -> bytes:
    """The content of a file without a key, as `write_prefix` writes it, which says `said` of its pages."""
    tensors, metadata = _contents(tokens, bits, said, None)
    return save(tensors, metadata)


def unpack(
    name: str, data: bytes, kind: BitsKind, page_size: int, said: Mapping[str, str]
) -> tuple[npt.NDArray[np.int64], Bits]:
    """The tokens and the pages `[n, ...]`, or states, of what `pack` gave.

    Raises:
        CheckpointError: as `read_prefix`; messages call the file `name`.
    """
    try:
        tensors = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        _check_metadata(name, metadata, said, tensors, ("tokens", "pages"))
    except CheckpointError:
        raise
    except Exception as error:  # damage of any kind, as several parsers tell it
        raise CheckpointError(f"{name}: cannot be read: {printable(error)}") from None
    _check_tensors(name, metadata, tensors["tokens"], tensors["pages"], kind, page_size, said, None)
    return tensors["tokens"], tensors["pages"]


def _contents(
    tokens: Sequence[int] | npt.NDArray[np.int64],
    bits: Bits,
    said: Mapping[str, str],
    key: bytes | None,
    more: Mapping[str, Bits] = MappingProxyType({}),
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The tensors and the metadata of a file."""
    tensors = {"tokens": np.asarray(tokens, np.int64), "pages": bits}
    digest = _digest(said, tensors["tokens"], bits, key, more)
    return {**tensors, **more}, {**said, _PLAIN if key is None else _KEYED: digest}


def _check_metadata(
    name: str, metadata: Mapping[str, str], said: Mapping[str, str], tensors: Iterable[str], expected: Sequence[str]
) -> None:
    for field, value in said.items():
        if metadata.get(field) != value:
            found = printable(repr(metadata.get(field)))
            raise CheckpointError(f"{name}: {field} is {found}, that of this model is {value!r}")
    if sorted(tensors) != sorted(expected):
        raise CheckpointError(f"{name}: holds other tensors than {' and '.join(expected)}")


def _check_tensors(
    name: str,
    metadata: Mapping[str, str],
    tokens: npt.NDArray[Any],
    pages: Bits,
    kind: BitsKind,
    page_size: int,
    said: Mapping[str, str],
    key: bytes | None,
    more: Mapping[str, Bits] = MappingProxyType({}),
) -> None:
    kind.check(name, "pages", pages)
    if tokens.dtype != np.int64 or tokens.shape != (len(pages) * page_size,):
        raise CheckpointError(f"{name}: {list(tokens.shape)} tokens of {tokens.dtype} for {len(pages)} pages")
    if (key is None) == (_KEYED in metadata):
        raise CheckpointError(f"{name}: was saved {'without a' if key is not None else 'with a'} key")
    digest = str(metadata.get(_PLAIN if key is None else _KEYED, ""))
    if not hmac.compare_digest(digest.encode(errors="replace"), _digest(said, tokens, pages, key, more).encode()):
        said_so = "SHA-256 than it says" if key is None else "HMAC than it says, or the key is another"
        raise CheckpointError(f"{name}: is damaged: its content has another {said_so}")


def page_bits(model: PagedModel, *, windows: bool = False) -> BitsKind:
    """The unsigned integers that a page's elements are kept as, and its shape; of a page of windows, if asked for."""
    dtype, shape = model.window_page_kind if windows else model.page_kind
    return BitsKind(np.dtype(f"uint{8 * _itemsize(dtype)}"), shape)


def state_bits(model: PagedModel) -> BitsKind:
    """The same of a state."""
    return BitsKind(np.dtype(np.uint32), (model.state_size,))


def expected(model: PagedModel) -> dict[str, str]:
    """Return what a file says of its pages, but for the digest of its content."""
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


def _digest(
    said: Mapping[str, str], tokens: npt.NDArray[Any], pages: Bits, key: bytes | None, more: Mapping[str, Bits]
) -> str:
    """Return the digest of all a file says and holds; without a key, of what it holds."""
    if key is None:
        found: Any = hashlib.sha256()
    else:
        found = hmac.new(key, json.dumps([dict(said), list(pages.shape)], sort_keys=True).encode(), hashlib.sha256)
    found.update(np.ascontiguousarray(tokens).data)
    for bits in (pages, *more.values()):
        found.update(np.ascontiguousarray(bits).data)
    return str(found.hexdigest())


def check_key(key: Any) -> bytes | None:
    """A key of `save_prefix`, or None.

    Raises:
        ContractTypeError, ContractError: it is no bytes, or of fewer than 16.
    """
    if key is None:
        return None
    if not isinstance(key, bytes):
        raise ContractTypeError(f"key must be bytes, not of type {type(key).__name__}")
    if len(key) < SHORTEST_KEY:
        raise ContractError(f"key must have at least {SHORTEST_KEY} bytes, not {len(key)}")
    return key
