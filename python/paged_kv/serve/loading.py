"""From settings to an engine. Bad settings are refused before weights are read or anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from max.dtype import DType

from paged_kv.arguments import printable
from paged_kv.checkpoint.adapters import read_adapter
from paged_kv.checkpoint.draft_layers import DraftSource, draft_source
from paged_kv.checkpoint.embedding_files import task_of
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import progress_bar
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractError
from paged_kv.graphs.models.config import with_cache_rotation
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.output import say
from paged_kv.serve.cache_size import CacheSize, cache_size_of, free_memory
from paged_kv.serve.settings import Settings


@dataclass(frozen=True)
class EngineSetup:
    """Settings of an engine that go together, and the pages that they come to."""

    settings: Settings
    source: Source
    dtype: DType
    size: CacheSize
    draft: Source | DraftSource | None
    """The smaller checkpoint, or the layer of the model, that drafts tokens."""
    disk: DiskTier | None

    def engine(self, tokenizer: Tokenizer) -> Engine:
        """Loads the models, and compiles each step that is not on disk.

        Raises:
            CheckpointError: the weights are not those of the configuration, or an adapter is not for the model.
            ToolchainError: a step cannot be compiled.
        """
        settings = self.settings
        draft: Any = settings.speculate
        layer = self.draft if isinstance(self.draft, DraftSource) else None
        if layer is not None:
            draft = layer.head.kind
        elif isinstance(self.draft, Source):
            draft = _load(self.draft, dtype_of(self.draft, settings.dtype), self.size)
        model = _load(
            self.source,
            self.dtype,
            self.size,
            settings.cache_dtype,
            settings.cache_rotation,
            self.size.num_window_pages,
            layer,
        )
        engine = Engine(
            model,
            tokenizer,
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_gap=settings.max_gap,
            disk=self.disk,
            speculate=draft,
        )
        for name, path in settings.adapters():
            engine.load_adapter(name, path)
        return engine


def set_up(settings: Settings) -> EngineSetup:
    """Check the settings of an engine, and work out its dtype and pages.

    Raises:
        CheckpointError: there is no model that this package runs, or an adapter is not for it.
        ContractError: a setting is bad or does not go with another, or the cache does not fit.
    """
    settings.check()
    source = open_source(settings.model)
    if (settings.task or task_of(source)) != "generate":
        problem = "expected a model that generates texts, got one that embeds or ranks them"
        raise ContractError(f"{printable(settings.model)}: {problem}")
    for _, path in settings.adapters():
        read_adapter(path, source.config, source.layer_names())
    dtype, draft = dtype_of(source, settings.dtype), _draft(settings, source)
    size = cache_size_of(
        with_cache_rotation(source.config, settings.cache_rotation),
        dtype,
        settings.cache_dtype,
        page_size=settings.page_size,
        pages=settings.pages,
        memory=None if settings.memory_gb is None else int(settings.memory_gb * 1e9),
        max_length=settings.max_length,
        requests=settings.max_running,
        free=free_memory(),
        draft=draft.config if isinstance(draft, DraftSource) else None,
    )
    disk = None if settings.kv_disk is None else DiskTier(settings.kv_disk, max(int(settings.kv_disk_gb * 1e9), 1))
    if disk is not None:
        disk.check()
    return EngineSetup(settings, source, dtype, size, draft, disk)


def dtype_of(source: Source, asked: str | None) -> DType:
    """The dtype of weights and cache: bfloat16, or float32 where the checkpoint has it, unless another is asked for."""
    return DType.float32 if (asked or source.config.dtype) == "float32" else DType.bfloat16


def _draft(settings: Settings, source: Source) -> Source | DraftSource | None:
    if settings.speculate in (None, "lookup"):
        return None
    if (layer := draft_source(settings.speculate, source)) is not None:
        return layer
    draft = open_source(Path(str(settings.speculate)))
    if draft.tokenizer()[0].get_vocab() != source.tokenizer()[0].get_vocab():
        raise ContractError(
            f"--speculate {printable(settings.speculate)}: expected the model's vocabulary, got another"
        )
    if draft.config.recurrence is not None:
        raise ContractError(f"--speculate {printable(settings.speculate)}: a model with recurrent layers cannot draft")
    return draft


def _load(
    source: Source,
    dtype: DType,
    size: CacheSize,
    kv_format: KVFormat | None = None,
    cache_rotation: CacheRotation | None = None,
    num_window_pages: int | None = None,
    layer: DraftSource | None = None,
) -> DecoderModel:
    with progress_bar("weights") as on_progress:
        return DecoderModel.from_folder(
            source,
            dtype=dtype,
            num_pages=size.num_pages,
            num_window_pages=num_window_pages,
            page_size=size.page_size,
            on_progress=on_progress,
            on_compile=lambda: say("compiling the decode step: half a minute, once for this kind of model and machine"),
            kv_format=kv_format,
            cache_rotation=cache_rotation,
            draft=layer,
        )
