"""Runs models: requests in, tokens and texts out, over pages that requests share (docs/engine.md)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_kv.engine.async_engine import AsyncEngine
    from paged_kv.engine.disk_tier import DiskTier
    from paged_kv.engine.embedding import Embedder, load_embedder
    from paged_kv.engine.engine import Engine
    from paged_kv.engine.requests import Output
    from paged_kv.engine.sampling import Logprobs, Sampling
    from paged_kv.kv_formats import KVFormat
    from paged_kv.options import CacheRotation
    from paged_kv.structured_output import Grammar, JsonSchema, Regex

__all__ = [
    "AsyncEngine",
    "DiskTier",
    "Embedder",
    "Engine",
    "Grammar",
    "JsonSchema",
    "Logprobs",
    "Output",
    "Regex",
    "Sampling",
    "load",
    "load_embedder",
]

_HOME = {
    "AsyncEngine": "async_engine",
    "DiskTier": "disk_tier",
    "Embedder": "embedding",
    "Engine": "engine",
    "Grammar": ".structured_output",
    "JsonSchema": ".structured_output",
    "Logprobs": "sampling",
    "Output": "requests",
    "Regex": ".structured_output",
    "Sampling": "sampling",
    "load_embedder": "embedding",
}


def load(
    folder: Path | str,
    *,
    num_pages: int,
    num_states: int | None = None,
    num_window_pages: int | None = None,
    page_size: int = 16,
    dtype: str | None = None,
    kv_format: KVFormat | None = None,
    cache_rotation: CacheRotation | None = None,
    **options: Any,
) -> Engine:
    """An engine with the model and the tokenizer of a checkpoint, on the CPU.

    Args:
        folder: A folder in Hugging Face format, or a GGUF file.
        num_pages: Pages of the cache.
        num_states: Slots of state of a hybrid model; as much memory as the pages take where None.
        num_window_pages: Pages of the layers with windows, where other layers have none; as many as the others where
            None, 0: none of their own. A request needs no more than its window (pool/README.md).
        page_size: Tokens in a page.
        dtype: "float32" or "bfloat16", of weights and cache; the checkpoint's own where None.
        kv_format: "int8" or "int4" keeps K and V as codes with scales (docs/quantised-cache.md).
        cache_rotation: "hadamard" rotates q and k before the cache (docs/quantised-cache.md).
        options: The options of `Engine`. As `speculate` also the folder of an EAGLE-3 head.

    Raises:
        CheckpointError: there is no checkpoint that this package runs.
        ContractTypeError, ContractError: a size or an option has the wrong type or is out of range; the checkpoint has
            no layer for `speculate="mtp"`.
    """
    from max.dtype import DType

    from paged_kv.arguments import shown
    from paged_kv.checkpoint.draft_layers import draft_source
    from paged_kv.checkpoint.source import open_source
    from paged_kv.engine.engine import Engine
    from paged_kv.engine.model import DecoderModel
    from paged_kv.engine.tokenizer import Tokenizer
    from paged_kv.errors import ContractError

    if dtype not in (None, "float32", "bfloat16"):
        raise ContractError(f"dtype: expected 'float32' or 'bfloat16', got {shown(dtype)}")
    source = open_source(folder)
    draft = draft_source(options.get("speculate"), source)
    if draft is not None:
        options["speculate"] = draft.head.kind
    kind = DType.bfloat16 if (dtype or source.config.dtype) == "bfloat16" else DType.float32
    tokenizer = Tokenizer(source, source.config)
    model = DecoderModel.from_folder(
        source,
        dtype=kind,
        num_pages=num_pages,
        num_states=num_states,
        num_window_pages=num_window_pages,
        page_size=page_size,
        kv_format=kv_format,
        cache_rotation=cache_rotation,
        draft=draft,
    )
    return Engine(model, tokenizer, **options)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paged_kv.engine' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", "paged_kv.engine"), name)
