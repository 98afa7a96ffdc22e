"""A try of a model before its first call: how its code calls the attention, which no config says.

Two sequences, of which one is padded, run through two small forward passes on pages, and for `generate_batch` two
tokens through one. What the attention is given there is compared with what this package can compute; the results of the
model are not looked at.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from paged_kv.errors import ContractError, ShapeError
from paged_kv.transformers import linear, running
from paged_kv.transformers.attention import Mask, attention_forward
from paged_kv.transformers.cache import CACHE_ARGUMENT, LAYER, PagedCache

NAME = "paged_kv_probe"
"""The name of a probe's attention in transformers."""
_reasons: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def why_not(model: Any, call: str) -> str | None:
    """Return why a model's code cannot run on pages in `generate` or `generate_batch`; None where it can.

    A model is tried once for each, and once more whenever its code, its mode or its kinds of layers changed.
    """
    key = call, _code_of(model)
    with _lock:
        reasons = _reasons.setdefault(model, {})
    if key not in reasons:
        reasons[key] = _try(model, call)
    return reasons[key]


def _code_of(model: Any) -> int:
    """A number of what a verdict depends on: modules, their own `forward` and mode, and the kinds of layers."""
    own = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        own.append((id(module), module.training, 0 if linear.is_served_by(forward) else id(forward)))
    return hash((type(model), tuple(own), repr(get_layer_types_and_kwargs(model.config))))


def _try(model: Any, call: str) -> str | None:
    try:
        with torch.no_grad(), torch.random.fork_rng([]), running.as_named(model, NAME):
            _generate(model) if call == "generate" else _generate_batch(model)
    except Exception as error:  # whatever the model's own code raises
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """The reason of an error on pages, of this package or of any other code."""
    if isinstance(error, ContractError | ShapeError):
        return str(error)
    return f"its code fails on pages ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


class _Cache(PagedCache):
    """A cache on pages that knows which windows its layers should have, and which masks they were given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.windows = [each.get("sliding_window") for each in get_layer_types_and_kwargs(config)[1]]
        self.masks: list[Mask] = []


class _Blocks(PagedAttentionCache):  # type: ignore[misc] # transformers has no types
    """A stand-in for the cache of `generate_batch`: the layers that it was given to. It has no pages."""

    def __init__(self, config: Any) -> None:
        self.heads = find_num_key_value_heads(config), find_head_dim(config)
        self.layers: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Marks the new K for the attention."""
        del layer_idx, kwargs
        setattr(key_states, LAYER, self)
        return key_states, value_states


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """`attention_forward`, or a refusal of how it is called."""
    layer = getattr(key, LAYER, None)
    blocks = kwargs.get("cache", layer)
    if isinstance(blocks, _Blocks):
        heads = key.shape[1], key.shape[3]
        if heads != blocks.heads or key.shape != value.shape:
            raise ContractError(f"its KV heads and head_dim are {heads}, by its config {blocks.heads}")
        if "read_index" not in kwargs:
            raise ContractError("its code does not hand on what generate_batch gives to attention")
        blocks.layers.append(module.layer_idx)  # type: ignore[arg-type]
        return torch.zeros_like(query).transpose(1, 2), None
    if layer is None or layer.new is None or layer.new[1] is not value:
        raise ContractError("it attends to other keys or values than those of the cache that it is given")
    if not isinstance(attention_mask, Mask):
        how = "attends without" if attention_mask is None else "changes"
        raise ContractError(f"its own code {how} attention_mask")
    if not attention_mask.is_causal or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        raise ContractError("its attention is not causal, or depends on positions in another way")
    cache: _Cache = layer.cache
    index = cache.layers.index(layer)
    window = cache.windows[index]
    if window is not None and window != attention_mask.window:
        raise ContractError(f"layer {index} forgets what is outside its window, and its mask has none")
    cache.masks.append(attention_mask)
    return attention_forward(module, query, key, value, attention_mask, **kwargs)


def _generate(model: Any) -> None:
    """Two forward passes, of a prompt and of a token."""
    cache = _Cache(model.config)
    for new_tokens, tokens in ((2, 2), (1, 3)):
        mask = torch.ones(2, tokens, dtype=torch.long, device="cpu")
        mask[0, 0] = 0
        ids = torch.ones(2, new_tokens, dtype=torch.long, device="cpu")
        model(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE_ARGUMENT: cache})
        if any(layer.new is not None or layer.get_seq_length() != tokens for layer in cache.layers):
            raise ContractError("it does not attend to all layers of its cache by transformers' interface")
        if any(each.was_read for each in cache.masks):
            raise ContractError("its own code reads attention_mask")


def _generate_batch(model: Any) -> None:
    """One forward pass of two tokens, given what `generate_batch` gives."""
    blocks, ends = _Blocks(model.config), torch.tensor([0, 2], dtype=torch.int32, device="cpu")
    model(
        input_ids=torch.ones(1, 2, dtype=torch.long, device="cpu"),
        position_ids=torch.arange(2, dtype=torch.long, device="cpu")[None],
        attention_mask=None,
        cache=blocks,
        use_cache=False,
        is_causal=True,
        cu_seq_lens_q=ends,
        cu_seq_lens_k={},
        max_length_q=2,
        max_length_k={},
        read_index=[],
        write_index=[],
        block_table=None,
        logits_indices=torch.tensor([1], dtype=torch.long, device="cpu"),
        logits_processor_args=torch.zeros(0, 1, dtype=torch.float32, device="cpu"),
    )
    if sorted(blocks.layers) != list(range(model.config.num_hidden_layers)):
        raise ContractError("its code does not hand the cache of generate_batch to its attention")
