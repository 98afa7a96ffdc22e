"""What is replaced in transformers, and put back: `generate`, and how continuous batching is set up.

While a call runs, its model's `config._attn_implementation` is "paged_kv" (or "paged_kv_int8", "paged_kv_int4"), under
which transformers finds the attention and the masks of this package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import transformers
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.options import KVFormat, check_kv_format
from paged_kv.transformers import linear
from paged_kv.transformers.attention import attention_forward, attention_mask
from paged_kv.transformers.batching import PagedBlocks, PagedFullAllocator, PagedSlidingAllocator
from paged_kv.transformers.cache import PagedCache, check_codes
from paged_kv.transformers.served import NAMES, format_of, warn_once, why_not, why_not_generate

TESTED = "5.23"
"""The release of transformers whose internals this knows."""

_lock = threading.RLock()
_originals: dict[str, Any] = {}
"""What is put back; "enabled" once all of it is replaced: an exception from outside may come in between; and the
"kv_format" of `enable`."""
_running: dict[int, tuple[set[object], list[Callable[[], Any]]]] = {}
"""By the id of a model that runs on pages: the calls and managers it runs in, and what makes it as it was."""


def enable(kv_format: KVFormat | None = None) -> None:
    """Makes `generate` and `generate_batch` of every model that can run on pages do so, in this process.

    A call that cannot runs by transformers' own code, which a warning says once for each class of models and reason.

    Args:
        kv_format: "int8" or "int4": pages of calls that begin from now on hold K and V as codes with a scale a token
            and KV head (docs/quantised-cache.md); a `PagedCache` that is given to `generate` keeps its own. None: pages
            in the model's dtype. A model whose head_dim has no such codes is refused by a ShapeError when it is called.

    Raises:
        ContractError: `kv_format` is unknown.
        ToolchainError: another release of transformers is installed.
    """
    check_kv_format(kv_format)
    found = transformers.__version__
    if found.rpartition(".")[0] != TESTED:
        raise ToolchainError(
            f"paged_kv.transformers knows the internals of transformers {TESTED}, {found} is installed"
        )
    with _lock:
        if "enabled" in _originals:
            _originals["kv_format"] = kv_format
            return
        if not _originals:
            _originals.update(
                generate=GenerationMixin.generate,
                switch=ContinuousBatchingManager.switch_to_cb_friendly_attn,
                allocators=dict(ATTN_TYPE_TO_ALLOCATOR),
                cache=continuous_api.PagedAttentionCache,
            )
        _originals["kv_format"] = kv_format
        for name in NAMES.values():
            AttentionInterface.register(name, attention_forward)
            AttentionMaskInterface.register(name, attention_mask)
        GenerationMixin.generate = _generate(_originals["generate"])
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _switch(_originals["switch"])
        ATTN_TYPE_TO_ALLOCATOR.update(full_attention=PagedFullAllocator, sliding_attention=PagedSlidingAllocator)
        continuous_api.PagedAttentionCache = PagedBlocks
        _originals["enabled"] = True


def disable() -> None:
    """Puts transformers' own code back. Calls that run, and managers that were made, go on as they began."""
    with _lock:
        if not _originals:
            return
        _originals.pop("enabled", None)
        GenerationMixin.generate = _originals["generate"]
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _originals["switch"]
        ATTN_TYPE_TO_ALLOCATOR.update(_originals["allocators"])
        continuous_api.PagedAttentionCache = _originals["cache"]
        _originals.clear()


@contextmanager
def enabled(kv_format: KVFormat | None = None) -> Iterator[None]:
    """`enable(kv_format)`, and at its end `disable()`, or the `kv_format` with which it was enabled before.

    Raises:
        ContractError, ToolchainError: as `enable`.
    """
    before = dict(_originals) if "enabled" in _originals else None
    restore = disable if before is None else partial(enable, before["kv_format"])
    try:
        enable(kv_format)
        yield
    finally:
        try:
            restore()
        finally:
            restore()  # the first one may have been interrupted


def _generate(original: Any) -> Any:
    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation_config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        reason = why_not(self) or why_not_generate(self, generation_config, kwargs)
        if reason is not None:
            warn_once(self, "generate", reason)
            return original(self, *args, **kwargs)
        kv_format = _originals.get("kv_format")
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = PagedCache(self.config, kv_format)
        with _on_pages(self, kv_format):
            return original(self, *args, **kwargs)

    return generate


def _switch(original: Any) -> Any:
    @wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        reason = why_not(model)
        if reason is not None:
            warn_once(model, "generate_batch", reason)
            original(self, model, auto_switch_to_flash)
            return
        kv_format = _originals.get("kv_format")
        check_codes(model.config, kv_format)
        if "stop" not in self.__dict__:  # a manager that was kept for another session is set up again
            try:
                _take(model, self, kv_format)
                running = format_of(model.config)
                if running != kv_format:
                    raise ContractError(f"kv_format is {kv_format!r}, and a call runs the model with {running!r}")
                self.stop = _releasing(self, model)
            except BaseException:
                self.__dict__.pop("stop", None)
                _release(model, self)
                raise

    return switch_to_cb_friendly_attn


def _releasing(manager: Any, model: Any) -> Any:
    """`stop` of a continuous batching manager, after which its model is as before."""
    stop = manager.stop

    @wraps(stop)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            stop(*args, **kwargs)
        finally:
            if manager.__dict__.pop("stop", None) is not None:
                _release(model, manager)

    return wrapper


@contextmanager
def _on_pages(model: Any, kv_format: KVFormat | None = None) -> Iterator[None]:
    call = object()
    try:
        _take(model, call, kv_format)
        yield
    finally:
        try:
            _release(model, call)
        finally:
            _release(model, call)  # the first one may have been interrupted


def _take(model: Any, user: object, kv_format: KVFormat | None) -> None:
    """Gives a model this package's attention and linear layers, until all users have released it: by the name that the
    first one's format has.
    """
    with _lock:
        users, undo = _running.setdefault(id(model), (set(), []))
        if not users:
            _undo(undo)  # of a release that was interrupted
        users.add(user)
        if not undo:
            _replace(model, undo, NAMES[kv_format])


def _release(model: Any, user: object) -> None:
    """Takes that back; nothing where this user had not come to take it, or has released it."""
    with _lock:
        users, undo = _running.get(id(model), (set(), []))
        users.discard(user)
        if not users:
            _undo(undo)
            _running.pop(id(model), None)


def _undo(undo: list[Callable[[], Any]]) -> None:
    while undo:
        undo[-1]()
        undo.pop()


def _replace(model: Any, undo: list[Callable[[], Any]], name: str) -> None:
    """Replaces a model's attention and linear layers; `undo` puts them back, from its end."""
    before = model.config._attn_implementation
    undo.append(lambda: before == name or model.set_attn_implementation(before))
    model.set_attn_implementation(name)
    linear.replace(model, undo)
