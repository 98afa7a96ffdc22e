"""Models of several checkpoints, and pages that are NaN."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from max.dtype import DType

from paged_kv.engine.model import DecoderModel
from paged_kv.kv_formats import KVFormat
from support.made import Made


@dataclass(frozen=True)
class Member:
    """One checkpoint and how it is to run."""

    folder: Path
    """Or its GGUF file."""
    dtype: DType
    page_size: int
    num_pages: int
    kv_format: KVFormat | None = None
    cache_rotation: str | None = None


def load_family(members: dict[str, Member]) -> dict[str, DecoderModel]:
    """Every member as `DecoderModel.from_folder` gives it, when it is first asked for."""

    def make(name: str) -> DecoderModel:
        member = members[name]
        return DecoderModel.from_folder(
            member.folder,
            dtype=member.dtype,
            num_pages=member.num_pages,
            page_size=member.page_size,
            kv_format=member.kv_format,
            cache_rotation=member.cache_rotation,
        )

    return Made(make)


def poison(model: DecoderModel) -> None:
    """Fills every page and state with NaN: whatever reads a slot that was not written shows."""
    for states in model._states:
        states[...] = float("nan")
    if model.draft_layer is not None:
        model.draft_layer.blocks.view(np.uint8)[...] = 255
        model.draft_layer.ends[...] = float("nan")
    for cache in {id(cache): cache for cache in (model._cache(windows=False), model._cache(windows=True))}.values():
        if not isinstance(cache, np.ndarray):
            blocks = torch.from_dlpack(cache)
            blocks.fill_(float("nan") if model.kv_format is None else torch.iinfo(blocks.dtype).max)
            torch.cuda.synchronize()
        elif model.kv_format is None:
            cache[...] = float("nan")
        else:
            cache.view(np.uint8)[...] = 255  # scales of bits that are all set are NaN too
