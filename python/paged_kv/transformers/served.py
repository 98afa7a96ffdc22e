"""Decide which models and calls run on pages; the others go on by transformers' own code, said once by a warning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from paged_kv.options import Q_DTYPES, is_head_dim
from paged_kv.transformers import probe
from paged_kv.transformers.cache import CACHE_ARGUMENT, PagedCache, cache_of, head_dims
from paged_kv.transformers.running import NAMES

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_REPLACED = ("eager", "sdpa", *NAMES.values())
"""A model that was told to use another attention keeps it."""
_DYNAMIC = (None, "dynamic", "hybrid")
"""Names of the cache that transformers makes by default; "hybrid" stands in published Gemma models."""

_warned: set[tuple[str, str]] = set()


def why_not(model: Any, call: str) -> str | None:
    """Return why a model does not run on pages in `generate` or `generate_batch`; None where it does."""
    config = model.config
    if config.is_encoder_decoder:
        return "it has an encoder and cross attention"
    if not _is_text(config):
        return "it reads more than text"
    if model.device.type != "cpu":
        return f"it is on {model.device}, and this runs on a CPU"
    if str(model.dtype).removeprefix("torch.") not in Q_DTYPES:
        return f"its dtype is {model.dtype}"
    if config._attn_implementation not in _REPLACED:
        return f"it was told to use {config._attn_implementation!r}"
    if not model._can_set_attn_implementation() or not model._supports_default_dynamic_cache():
        return "its attention cannot be replaced"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its attention is latent (MLA)"
    types = set(get_layer_types_and_kwargs(config)[0])
    if not types <= _ATTENTION_TYPES:
        return f"it has layers of type {', '.join(sorted(types - _ATTENTION_TYPES))}"
    dims = head_dims(config)
    if not all(map(is_head_dim, dims)):
        return f"its head_dim is {', '.join(map(str, sorted(dims)))}"
    if call == "generate_batch" and len(dims) > 1:
        return "its head_dim differs by layer"
    if _is_compiled(model):
        return "its attention is compiled by torch"
    return probe.why_not(model, "generate") or (probe.why_not(model, call) if call == "generate_batch" else None)


def _is_compiled(model: Any) -> bool:
    """Return whether torch.compile has an attention, alone or with the layers around it."""
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
        if not isinstance(module, torch.nn.Linear) and any(hasattr(part, "layer_idx") for part in module.modules())
    )


def _is_text(config: Any) -> bool:
    try:
        return config.get_text_config() is config
    except ValueError:  # it has several
        return False


def why_not_generate(model: Any, arguments: dict[str, Any]) -> str | None:
    """The reason why a call of `generate` does not run on pages though its model does, or None."""
    option = partial(_option, model, arguments)
    cache = cache_of(arguments)
    if cache is not None and not isinstance(cache, PagedCache):
        return f"{CACHE_ARGUMENT} is a {type(cache).__name__}"
    if option("cache_implementation") not in _DYNAMIC:
        return f"cache_implementation is {option('cache_implementation')!r}"
    if option("use_cache") is False:
        return "use_cache is False"
    if option("output_attentions"):
        return "output_attentions is set"
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return "attention_mask is not [batch, tokens]"
    if mask is not None and mask.device.type == "cpu" and not mask.bool().any(1).all():
        return "attention_mask hides all tokens of a sequence"  # whose rows see all in some models
    return None


def without_cache_implementation(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` with a cache: one of "dynamic" too, which transformers refuses beside one."""
    is_named = _option(model, arguments, "cache_implementation") == "dynamic"
    return arguments | {"cache_implementation": None} if is_named else arguments


def _option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """An option of `generate`: of its arguments, its generation_config or its model's."""
    configs = arguments.get("generation_config"), model.generation_config
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def warn_once(model: Any, call: str, reason: str) -> None:
    """Says of a class of models, once for each reason, that transformers' own code runs."""
    key = type(model).__name__, reason
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"paged_kv.transformers does not serve {call} of {key[0]}: {reason}; it runs by transformers' own code",
            stacklevel=3,
        )
