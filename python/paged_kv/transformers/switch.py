"""Replace parts of transformers, and put them back: `generate`, and how continuous batching is set up.

While a call runs, its model's `config._attn_implementation` is "paged_kv" (or "paged_kv_int8", "paged_kv_int4") in its
thread, by which transformers finds the attention and the masks of this package.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import transformers
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from paged_kv.errors import ToolchainError
from paged_kv.kv_formats import KVFormat
from paged_kv.options import check_kv_format
from paged_kv.transformers import linear, probe, running
from paged_kv.transformers.attempt import Attempt
from paged_kv.transformers.attention import attention_forward, attention_mask
from paged_kv.transformers.batching import on_blocks
from paged_kv.transformers.cache import PagedCache, cache_of, check_codes
from paged_kv.transformers.running import NAMES
from paged_kv.transformers.served import warn_once, why_not, why_not_generate, without_cache_implementation

TESTED = ("5.23", "5.24")
"""The releases of transformers whose internals this knows."""

_lock = threading.RLock()
_originals: dict[str, Any] = {}
"""The originals to put back; "enabled" once all of it is replaced: an exception from outside may come in between; and
the "kv_format" of `enable`."""
_ON_PAGES = "_paged_kv_name"
"""The attribute of a manager of `generate_batch` that runs on pages: the name of its attention."""


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
    installed = transformers.__version__
    if installed.rpartition(".")[0] not in TESTED:
        raise ToolchainError(
            f"paged_kv.transformers knows the internals of transformers {' and '.join(TESTED)}, got {installed}"
        )
    with _lock:
        if "enabled" in _originals:
            _originals["kv_format"] = kv_format
            return
        if not _originals:
            _originals.update(
                generate=GenerationMixin.generate,
                switch=ContinuousBatchingManager.switch_to_cb_friendly_attn,
            )
        _originals["kv_format"] = kv_format
        attentions = dict.fromkeys(NAMES.values(), attention_forward) | {probe.NAME: probe.attention}
        for name, attention in attentions.items():
            AttentionInterface.register(name, attention)
            AttentionMaskInterface.register(name, attention_mask)
        GenerationMixin.generate = _generate(_originals["generate"])
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _switch(_originals["switch"])
        _originals["enabled"] = True


def disable() -> None:
    """Puts transformers' own code back. Calls that run, and managers that were made, go on as they began."""
    with _lock:
        if not _originals:
            return
        _originals.pop("enabled", None)
        GenerationMixin.generate = _originals["generate"]
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _originals["switch"]
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
    parameters = list(inspect.signature(original).parameters)[1:-1]  # neither self nor kwargs

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with running.as_named(self, None):  # where a call on pages makes another one
            is_enabled, kv_format = "enabled" in _originals, _originals.get("kv_format")
            if not is_enabled or len(args) > len(parameters) or kwargs.keys() & parameters[: len(args)]:
                return original(self, *args, **kwargs)  # which refuses the arguments
            arguments = dict(zip(parameters, args, strict=False)) | kwargs
            reason = why_not_generate(self, arguments) or why_not(self, "generate")
            if reason is not None:
                warn_once(self, "generate", reason)
                return original(self, **arguments)
            attempt = Attempt(arguments, cache_of(arguments) or PagedCache(self.config, kv_format))
            try:
                with linear.replaced(self), running.as_named(self, NAMES[kv_format]):
                    return original(self, **without_cache_implementation(self, attempt.arguments()))
            except Exception as error:  # of transformers, of torch or of the model's code as well
                if not attempt.may_be_repeated():
                    raise
                reason = probe.reason(error)
            result = original(self, **attempt.arguments_afterwards())
            warn_once(self, "generate", reason)  # not where transformers raises too
            return result

    return generate


def _switch(original: Any) -> Any:
    @wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        if _ON_PAGES in self.__dict__:  # a manager that was kept for another session
            return
        reason = why_not(model, "generate_batch")
        if self.batch_processor is not None:
            reason = "its manager was made without this package and kept"
        if reason is not None:
            warn_once(model, "generate_batch", reason)
            original(self, model, auto_switch_to_flash)
            return
        kv_format = _originals.get("kv_format")
        check_codes(model.config, kv_format)
        _put_on_pages(self, model, NAMES[kv_format])

    return switch_to_cb_friendly_attn


def _put_on_pages(manager: Any, model: Any, name: str) -> None:
    """Let a manager of `generate_batch` run on pages for as long as it lives."""
    create = manager._create_batch_processor

    def on_pages(method: Any) -> Any:
        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with linear.replaced(model), running.as_named(model, name):
                return method(*args, **kwargs)

        return wrapper

    def create_on_blocks() -> Any:
        with on_blocks():
            return create()

    manager.__dict__ |= {
        "warmup": on_pages(manager.warmup),
        "_run_generation_loop": on_pages(manager._run_generation_loop),
        "_create_batch_processor": create_on_blocks,
        _ON_PAGES: name,
    }
