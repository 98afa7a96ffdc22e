"""The attention of a call: decided when it begins, and known to its thread alone.

transformers finds attention and masks by `config._attn_implementation`. While calls run on pages, that attribute
answers each thread by its own calls. So a call goes on as it began, whatever `enable`, `disable` and other threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from paged_kv.kv_formats import CODE_DTYPES, KVFormat

NAMES: dict[KVFormat | None, str] = {None: "paged_kv"} | {codes: f"paged_kv_{codes}" for codes in CODE_DTYPES}
"""The name of this attention in transformers, by the codes that pages hold: `config._attn_implementation`. Allocators
of `generate_batch` know no more of a call than its model's config."""


class _Thread(threading.local):
    names: Mapping[int, str] = {}
    """The attention by the id of a config; replaced, never changed."""


_thread = _Thread()
_lock = threading.RLock()
_calls: set[object] = set()
_plain: Any = PreTrainedConfig._attn_implementation


def _of_this_thread(config: Any) -> str | None:
    name: str | None = _thread.names.get(id(config)) or _plain.fget(config)
    return name


_by_thread = property(_of_this_thread, _plain.fset)


def format_of(config: Any) -> KVFormat | None:
    """Return the codes of a model that this thread runs on pages; None: pages hold its dtype, or it is not on pages."""
    return next((codes for codes, name in NAMES.items() if name == config._attn_implementation), None)


def on_pages() -> bool:
    """Return whether this thread runs a call on pages."""
    return bool(_thread.names)


@contextmanager
def as_named(model: nn.Module, name: str | None) -> Iterator[None]:
    """Let this thread run a model with the attention of that name; None: all models with that of their configs."""
    call, before = object(), _thread.names
    try:
        if name is not None:
            with _lock:
                _calls.add(call)
                PreTrainedConfig._attn_implementation = _by_thread
        _thread.names = {} if name is None else {**before, **dict.fromkeys(_configs(model), name)}
        yield
    finally:
        try:
            _end(call, before)
        finally:
            _end(call, before)  # the first one may have been interrupted


def _end(call: object, before: Mapping[int, str]) -> None:
    _thread.names = before
    with _lock:
        _calls.discard(call)
        if not _calls:
            PreTrainedConfig._attn_implementation = _plain


def _configs(model: nn.Module) -> set[int]:
    """The ids of the configs by which a model's modules find their attention."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config) for config in configs if isinstance(config, PreTrainedConfig)}
