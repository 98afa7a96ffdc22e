"""The engine's interfaces to a model and a tokenizer, and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paged_kv.engine.adapters import Adapters
from paged_kv.engine.page_file import PagedModel
from paged_kv.engine.stop_text import Decoder
from paged_kv.errors import ContractError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.structured_output import CompiledStructure, Structure, StructureCompiler


@dataclass(frozen=True)
class StepStates:
    """The slots that a step reads and saves states in (`graphs.inputs.StateInputs`), for each request."""

    sources: Sequence[int]
    """Slots; -1 where no token came before."""
    saves: Sequence[Sequence[tuple[int, int]]]
    """After how many of its tokens its state is saved in which slots; at last after all of them."""


class EngineModel(PagedModel, Protocol):
    """The engine's interface to a model (`model.DecoderModel`)."""

    config: DecoderConfig
    num_pages: int
    num_states: int
    """Slots for the states of recurrent layers; 0 where it has none."""

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        counts: Sequence[int] | None = None,
        states: StepStates | None = None,
        window_pages: Sequence[Sequence[int]] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Appends new tokens of `B` requests to their pages; logits `[N, vocab]` after the last `counts[b]` of each.

        One of each where `counts` is None; it is given only where tokens are drafted. `states` is given where
        `num_states` is not 0: the model reads and saves states as it says. `window_pages` are given where
        `num_window_pages` is not 0: those of the layers with windows, `NO_PAGE` for those that no window reaches.
        `adapters` are given where a request has one: the index of each (`engine.adapters`).
        """
        ...

    def copy_page(self, source: int, target: int, *, windows: bool = False) -> None:
        """Copies a page, or one of the layers with windows: K and V of all its layers."""
        ...


@runtime_checkable
class AdaptedModel(Protocol):
    """The further interface to a model, for requests with adapters."""

    @property
    def adapters(self) -> Adapters:
        """Its LoRA adapters. Raises ContractError where it can have none."""
        ...


class TextCoder(Protocol):
    """The engine's interface to a tokenizer (`tokenizer.Tokenizer`)."""

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def stream(self, *, skip_special_tokens: bool = True) -> Decoder:
        """A decoder for the tokens of one sample, which shows special tokens or does not."""
        ...


@runtime_checkable
class StructureCoder(Protocol):
    """The interface to a tokenizer beside that, for requests with a structure."""

    @property
    def structure_compiler(self) -> StructureCompiler:
        """Compiles structures for its vocabulary."""
        ...


def compile_structure(tokenizer: object, structure: Structure | None) -> CompiledStructure | None:
    """Compile a request's structure for a tokenizer.

    Raises:
        ContractError: the tokenizer compiles none, or this one cannot be compiled.
        ToolchainError: as `StructureCompiler`.
    """
    if structure is None:
        return None
    if not isinstance(tokenizer, StructureCoder):
        raise ContractError("structured_output: it needs a tokenizer that has `structure_compiler`")
    return tokenizer.structure_compiler.compile(structure)


@dataclass
class Statistics:
    """Counts of an engine's work; times in seconds. A step that mixes prompts and decoding is shared by their
    tokens.
    """

    steps: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts that were computed; those computed again after a preemption too."""
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    peak_pages: int = 0
    draft_tokens: int = 0
    """Tokens that were drafted and brought to a step."""
    accepted_tokens: int = 0
    """Those of them that were chosen; they are among `decode_tokens`."""

    def add_step(self, seconds: float, prompt_tokens: int, decode_tokens: int, pages: int) -> None:
        """Counts a step that computed so many tokens while so many pages were used."""
        total = prompt_tokens + decode_tokens
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        self.decode_tokens += decode_tokens
        self.prefill_seconds += seconds * prompt_tokens / total
        self.decode_seconds += seconds * decode_tokens / total
        self.peak_pages = max(self.peak_pages, pages)

    def add_drafts(self, right: int, drafted: int) -> None:
        """Counts drafts of one sample in a step; each right one was a token more."""
        self.draft_tokens += drafted
        self.accepted_tokens += right
        self.decode_tokens += right
