"""The attention and the masks that transformers calls by the name "paged_kv".

A mask is built only where the kernels do not know it: a causal one, or one with a sliding window, of sequences that are
padded on the left, is a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from paged_kv.errors import ContractError
from paged_kv.torch.attention import planned
from paged_kv.transformers.batching import attend_batch
from paged_kv.transformers.cache import CACHE_ARGUMENT, LAYER, PAGE_SIZE, Ints, PagedLayer, Step


class Mask(Tensor):
    """A mask as transformers asked for it: this attention reads its facts, and other code the mask itself.

    Code that computes with it gets the mask `[B, 1, T, tokens]` of `torch.bool`, which is built for that.
    """

    arguments: dict[str, Any]
    """The arguments of `sdpa_mask`."""
    window: int | None
    """A row sees its last `window` tokens; None: all of them."""
    is_causal: bool
    """True if it is causal, or causal with a window, over sequences that are padded on the left alone."""
    padding: Ints | None
    """`[B]`, hidden tokens before the first one that is seen; None where nothing is hidden."""
    was_read: bool
    """True if other code computed with it."""

    @cached_property
    def dense(self) -> Tensor:
        """The tokens that are seen, `[B, 1, T, tokens]`."""
        mask: Tensor = sdpa_mask(**self.arguments | {"allow_is_causal_skip": False})
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        masks: list[Mask] = []

        def dense(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            masks.append(x)
            return x.dense

        args, kwargs = tree_map(dense, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or func.__name__ not in _SHAPE:
            for mask in masks:
                mask.was_read = True
        return result


_SHAPE = ("__get__", "dim", "size")
"""Functions of a tensor that read its shape, dtype and device, and no number of it."""


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask:
    """Return what a model's code hands on as its mask; the arguments are those of transformers' `sdpa_mask`."""
    is_causal, window = _pattern(mask_function)
    padding = None
    if attention_mask is not None:
        seen = attention_mask[:, :kv_length].numpy().astype(bool)
        if not seen.all():
            padding = np.where(seen.any(1), seen.argmax(1), seen.shape[1])
            is_causal &= bool((seen.sum(1) == seen.shape[1] - padding).all())
    mask: Mask = torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(Mask)
    mask.arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **kwargs,
    }
    mask.window, mask.is_causal, mask.padding, mask.was_read = window, is_causal, padding, False
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[B, Hq, T, D]`, as transformers' own functions: `[B, T, Hq, D]`, and no weights.

    Raises:
        ContractError: there is dropout, or a mask shows tokens that the cache took for padding and did not store.
    """
    if dropout:
        raise ContractError(f"dropout is {dropout}: paged_kv computes inference, call model.eval() first")
    layer, mask = getattr(key, LAYER, cache), attention_mask if isinstance(attention_mask, Mask) else None
    if isinstance(layer, PagedAttentionCache):
        return attend_batch(module, query, key, value, scaling, softcap, s_aux, layer, kwargs), None
    if layer is None:
        dense = attention_mask if mask is None else mask.dense
        return _attend_densely(module, (query, key, value), dense, scaling, softcap, s_aux, kwargs), None
    # Without a mask torch's attention is causal, that of models with soft caps or sinks is not.
    is_causal = mask.is_causal if mask is not None else attention_mask is None and softcap is None and s_aux is None
    step = layer.store(mask.padding if mask is not None and mask.is_causal else None)
    is_causal &= _check_padding(step, attention_mask)
    if is_causal and kwargs.get("position_bias") is None and kwargs.get("is_causal") in (None, True):
        window = None if mask is None else mask.window
        return _attend(layer, step, query, scaling, window, softcap, s_aux), None
    keys, values = layer.dense(step, query.dtype)
    dense = attention_mask if mask is None else mask.dense
    return _attend_densely(module, (query, keys, values), dense, scaling, softcap, s_aux, kwargs), None


def _check_padding(step: Step, mask: Tensor | None) -> bool:
    """Return whether a mask begins with the padding that a cache did not store, and hides no token more there.

    Raises:
        ContractError: it shows tokens of that padding.
    """
    hidden = getattr(mask, "padding", None)
    if hidden is None:
        hidden = np.zeros_like(step.padding)
    shown = step.padding > hidden
    if shown.any():
        b = int(shown.argmax())
        raise ContractError(
            f"attention_mask: sequence {b} begins with {hidden[b]} hidden tokens, expected at least {step.padding[b]}:"
            f" {CACHE_ARGUMENT} took them for padding and did not store them"
        )
    return bool((step.padding == hidden).all())


def _attend_densely(
    module: torch.nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    others: dict[str, Any],
) -> Tensor:
    """Attention under any mask of query `[B, Hq, T, D]`, keys and values `[B, Hk, tokens, D]`: `[B, T, Hq, D]`."""
    query, keys, values = states
    if softcap is None and sinks is None:
        o: Tensor = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **others)[0]
        return o
    if others.get("position_bias") is not None:
        raise ContractError("position_bias: not computed beside soft caps and sinks")
    heads, tokens = query.shape[1], keys.shape[2]
    keys, values = (repeat_kv(x, heads // x.shape[1]).float() for x in (keys, values))
    scores = (query.float() @ keys.mT) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(query.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)], 3)
    weights = scores.softmax(3)[..., :tokens]
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous()


def _attend(
    layer: PagedLayer,
    step: Step,
    query: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, new_tokens, head_dim = query.shape
    assert layer.k_pages is not None
    assert layer.v_pages is not None
    q = query.transpose(1, 2).reshape(batch * new_tokens, heads, head_dim)
    attention = planned(
        (heads, layer.k_pages.shape[2], layer.k_pages.shape[3], PAGE_SIZE),
        (query.dtype, layer.k_pages.dtype),
        (scaling, -1 if window is None else window - 1, softcap or 0.0, False),
    )
    o, _ = attention.over_pages(step.rows, q, layer.k_pages, layer.v_pages, sinks)
    return o.view(batch, new_tokens, heads, head_dim)


def _pattern(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a mask of transformers is causal or a causal sliding window, and that window."""
    if mask_function is causal_mask_function:
        return True, None
    for overlay, rest in _both(mask_function):
        window = _closed_over(overlay, "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
        if rest is causal_mask_function and isinstance(window, int):
            return True, window
    return False, None


def _both(mask_function: Callable[..., Any]) -> list[Any]:
    """The two functions that `and_masks` joined; nothing for another function."""
    functions = _closed_over(mask_function, "and_masks.<locals>.and_mask", "mask_functions")
    return [functions] if isinstance(functions, tuple) and len(functions) == 2 else []


def _closed_over(function: Any, qualname: str, name: str) -> Any:
    """A variable that an inner function of transformers' masking_utils has closed over; None for another function."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    if code is None or module != "transformers.masking_utils" or function.__qualname__ != qualname:
        return None
    return dict(zip(code.co_freevars, function.__closure__, strict=True))[name].cell_contents
