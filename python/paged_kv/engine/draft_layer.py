"""A draft layer, bound to its weights, with its K and V of the model's pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.checkpoint.draft_layers import DraftSource
from paged_kv.engine.page_file import Bits
from paged_kv.engine.step import read
from paged_kv.graphs.inputs import step_inputs
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.drafting import build_draft_step
from paged_kv.kv_formats import KVFormat
from paged_kv.runtime.program import Program

Floats = npt.NDArray[np.float32]
LEAST_LOGIT = np.float32(-np.inf)
"""The logit of a token that the layer does not know."""


class DraftLayer:
    """Runs a draft layer on the CPU (`graphs.models.drafting`).

    Args:
        source: The layer.
        weights: As `DraftSource.load` gives them for `dtype`, with `decoder.DRAFT_PREFIX`; they outlive the layer.
        dtype, kv_format: As of its model.
        blocks: Its K and V `[pages, 2, 1, page_size, Hk, D]`, or latents, of the pages of its model.

    Raises:
        ToolchainError: as `libraries.load`.
    """

    def __init__(
        self,
        source: DraftSource,
        weights: Mapping[str, np.ndarray],
        dtype: DType,
        kv_format: KVFormat | None,
        blocks: np.ndarray,
        vocab_size: int,
    ) -> None:
        self.config, self.blocks = source.config, blocks
        self.kind = source.head.kind
        self.ends = np.zeros((len(blocks), source.config.hidden_size), np.float32)
        """Of each page the hidden state, as the layer takes it, of its last token: prompts that share a page go on
        from there.
        """
        self._tokens, self._vocab_size = source.tokens, vocab_size
        buffers = [*[None] * 4, blocks, *[None] * 3]
        graph = read(
            lambda module, library: build_draft_step(
                source.config, dtype, module, kv_format=kv_format, library=library
            ),
            buffers,
        )
        self._program = Program(graph, {name: weights[name] for name in graph.weights}, buffers)

    def append(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        hidden: Floats,
    ) -> None:
        """Appends the layer's K and V of the tokens of a step. `hidden` `[T, hidden]` are the hidden states of the
        tokens before them.
        """
        self._run(tokens, cache_lengths, pages, hidden, np.empty(0, np.int32))

    def step(
        self, tokens: Sequence[int], cache_lengths: Sequence[int], pages: Sequence[Sequence[int]], hidden: Floats
    ) -> tuple[Floats, Floats]:
        """Appends a token to each of `N` texts; the model's logits `[N, vocab]` after it as the layer expects them, and
        the hidden states `[N, hidden]` that the next step takes. `hidden` `[N, hidden]` are those of the tokens before.
        """
        rows = np.arange(len(tokens), dtype=np.int32)
        logits, states = self._run([[token] for token in tokens], cache_lengths, pages, hidden, rows)
        if self._tokens is not None:
            of_model = np.full((len(tokens), self._vocab_size), LEAST_LOGIT, np.float32)
            of_model[:, self._tokens] = logits
            logits = of_model
        return logits, states

    @property
    def page_bytes(self) -> int:
        """Bytes of what a page has of the layer: its K and V, and a hidden state."""
        shape = self.blocks.shape[1:]
        return math.prod(shape) * self.blocks.itemsize + self.ends.shape[1] * self.ends.itemsize

    def page_bits(self, page: int, itemsize: int) -> Bits:
        """The bits of what a page has of the layer, as unsigned integers of so many bytes, `[n]`."""
        parts = [part.reshape(-1).view(f"u{itemsize}") for part in (self.blocks[page], self.ends[page])]
        return np.concatenate(parts)

    def put_bits(self, page: int, bits: Bits) -> None:
        """Replaces it by what `page_bits` gave."""
        of_blocks = self.blocks[page].nbytes // bits.itemsize
        self.blocks[page] = bits[:of_blocks].copy().view(self.blocks.dtype).reshape(self.blocks.shape[1:])
        self.ends[page] = bits[of_blocks:].copy().view(np.float32)

    def copy_page(self, source: int, target: int) -> None:
        """Copies it."""
        self.blocks[target], self.ends[target] = self.blocks[source], self.ends[source]

    def _run(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        hidden: Floats,
        rows: npt.NDArray[np.int32],
    ) -> list[np.ndarray]:
        *step, _ = step_inputs(tokens, cache_lengths, pages, self.blocks).flatten()
        return self._program.run([*step, np.ascontiguousarray(hidden), places(len(hidden), 2), rows])


def places(rows: int, count: int) -> npt.NDArray[np.int32]:
    """The `places` of `decoder.joined`, `[rows, count]`."""
    return np.repeat(np.arange(rows, dtype=np.int32), count).reshape(rows, count)


def draft_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a draft layer by their names in the graphs."""
    return {f"{decoder.DRAFT_PREFIX}{name}": array for name, array in weights.items()}
