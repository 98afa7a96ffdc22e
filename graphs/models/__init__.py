"""The registry of model families: a module for each, under the name that `config.json` has for its architecture."""

from __future__ import annotations

from typing import Any, Protocol

from max.dtype import DType
from max.graph import DeviceRef, Module

from paged_kv.graphs.models import llama


class Family(Protocol):
    """What the module of a family defines."""

    STEP: str
    """The name of the step's graph."""

    def expected_tensors(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Hugging Face's name and shape of every weight."""

    def cache_shape(self, config: Any, pages: int | str, page_size: int) -> list[int | str]:
        """The shape of the cache's one buffer."""

    def build_step(
        self, config: Any, dtype: DType, page_size: int, module: Module, device: DeviceRef | None = None
    ) -> None:
        """Adds the graph `STEP` to `module`: `DecodeInputs` -> logits `[B, vocab]` float32."""


FAMILIES: dict[str, Family] = {llama.LlamaConfig.architecture: llama}
