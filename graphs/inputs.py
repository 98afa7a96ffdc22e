"""The inputs of one step of a batch, in one dataclass with one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, TensorType, TensorValue, Value

from paged_kv.options import NO_PAGE

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class DecodeInputs(Generic[T, B]):
    """One step: for each of `B` requests its next tokens, one after the other (`T` in all).

    The same fields in the same order serve as input types, as values inside the graph, and as arrays.
    A request brings one token when it decodes and many when it prefills; one step may mix both.
    """

    tokens: T
    """`[T]` int32: the new tokens, request after request; entries past the last request's are padding."""
    row_offsets: T
    """`[B + 1]` uint32: request `b` brings `tokens[row_offsets[b] : row_offsets[b + 1]]`, at least one."""
    cache_lengths: T
    """`[B]` uint32: tokens already in the cache, those of this step excluded."""
    lookup_table: T
    """`[B, max_pages]` uint32: the pages of each request, enough for this step's tokens too."""
    blocks: B
    """`[pages, 2, layers, page_size, Hk, D]`: K and V of all layers, changed in place. With latent attention
    `[pages, layers, page_size, width]`."""

    def flatten(self) -> list[T | B]:
        """The fields in the order of the graph's inputs."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class WindowInputs(Generic[T, B]):
    """The pages of the layers with windows, where they have their own."""

    lookup_table: T
    """`[B, max_pages]` uint32, as `DecodeInputs.lookup_table`: a page that no window reaches any more is `NO_PAGE`."""
    blocks: B
    """`[pages, 2, layers, page_size, Hk, D]`: K and V of these layers, changed in place."""

    def flatten(self) -> list[T | B]:
        """The fields in the order of the graph's inputs."""
        return [self.lookup_table, self.blocks]


@dataclass(frozen=True)
class StateInputs(Generic[T, B]):
    """The slots of `buffers` in which a step of `B` requests reads and saves the states of recurrent layers.

    A request's state is read once, from its source, and saved after some of its rows, the last of them included: at
    the end of a page that is to be found by other prompts, after each draft. So no state is copied, and none of the
    tokens is computed again where drafts were wrong.
    """

    sources: T
    """`[B]` int32: the slot of a request's state; -1 for the state before the first token, all zeros."""
    save_offsets: T
    """`[B + 1]` uint32: the saves of request `b` are those from `save_offsets[b]` to `save_offsets[b + 1]`, at least
    one.
    """
    save_counts: T
    """`[S]` int32: the number of the request's rows after which each state is saved, ascending in a request."""
    save_slots: T
    """`[S]` int32: the slot that it is saved in, perhaps the source of the same request, and of no other one."""
    buffers: tuple[B, ...]
    """Windows of convolutions and matrix states (`decoder.state_shapes`), changed in place."""

    def flatten(self) -> list[T | B]:
        """The fields in the order of the graph's inputs; none where there are no buffers."""
        if not self.buffers:
            return []
        return [self.sources, self.save_offsets, self.save_counts, self.save_slots, *self.buffers]


def state_input_types(shapes: Sequence[Sequence[int | str]], device: DeviceRef) -> StateInputs[TensorType, BufferType]:
    """The graph's input types for states of these shapes."""
    return StateInputs(
        TensorType(DType.int32, ["B"], device),
        TensorType(DType.uint32, ["B_plus_1"], device),
        TensorType(DType.int32, ["S"], device),
        TensorType(DType.int32, ["S"], device),
        tuple(BufferType(DType.float32, list(shape), device) for shape in shapes),
    )


def graph_states(values: Sequence[Value[Any]]) -> StateInputs[TensorValue, BufferValue]:
    """A graph's inputs that have to do with states, by name."""
    sources, offsets, counts, slots, *buffers = values
    of_slots = tuple(value.buffer for value in buffers)
    return StateInputs(sources.tensor, offsets.tensor, counts.tensor, slots.tensor, of_slots)


def state_inputs(
    sources: Sequence[int], saves: Sequence[Sequence[tuple[int, int]]], buffers: Sequence[B]
) -> StateInputs[np.ndarray, B]:
    """One step from lists by request: its slot, and after how many of its tokens its state is saved in which slots."""
    offsets = np.zeros(len(saves) + 1, np.uint32)
    np.cumsum([len(each) for each in saves], out=offsets[1:])
    flat = np.array([save for each in saves for save in each], np.int32).reshape(-1, 2)
    counts, slots = np.ascontiguousarray(flat.T)
    return StateInputs(np.asarray(sources, np.int32), offsets, counts, slots, tuple(buffers))


def input_types(dtype: DType, blocks: Sequence[int | str], device: DeviceRef) -> DecodeInputs[TensorType, BufferType]:
    """The graph's input types; `blocks` is the shape of the cache, every other size is symbolic."""
    return DecodeInputs(
        TensorType(DType.int32, ["T"], device),
        TensorType(DType.uint32, ["B_plus_1"], device),
        TensorType(DType.uint32, ["B"], device),
        TensorType(DType.uint32, ["B", "max_pages"], device),
        BufferType(dtype, list(blocks), device),
    )


def window_input_types(
    dtype: DType, blocks: Sequence[int | str], device: DeviceRef
) -> WindowInputs[TensorType, BufferType]:
    """The graph's input types for pages of windows, which are as many a request as the others."""
    table = TensorType(DType.uint32, ["B", "max_pages"], device)
    return WindowInputs(table, BufferType(dtype, list(blocks), device))


def graph_inputs(values: Sequence[Value[Any]]) -> DecodeInputs[TensorValue, BufferValue]:
    """A graph's inputs, by name."""
    tokens, row_offsets, cache_lengths, lookup_table, blocks = values
    return DecodeInputs(tokens.tensor, row_offsets.tensor, cache_lengths.tensor, lookup_table.tensor, blocks.buffer)


def step_inputs(
    tokens: Sequence[Sequence[int]], cache_lengths: Sequence[int], pages: Sequence[Sequence[int]], blocks: B
) -> DecodeInputs[np.ndarray, B]:
    """One step from lists by request, over the storage `blocks`.

    Table entries past a request's pages hold a page id that no pool has: a use of one is an error.
    """
    row_offsets = np.zeros(len(tokens) + 1, np.uint32)
    np.cumsum([len(new) for new in tokens], out=row_offsets[1:])
    flat = np.fromiter((token for new in tokens for token in new), np.int32)
    lengths = np.asarray(cache_lengths, np.uint32)
    return DecodeInputs(flat, row_offsets, lengths, page_table(pages), blocks)


def window_lengths(inputs: DecodeInputs[np.ndarray, Any], after: int) -> np.ndarray:
    """For each token of a step the tokens before the end of its window, `[T]` int32: those up to it and `after`
    more, as far as its request has them.
    """
    offsets, cached = inputs.row_offsets.astype(np.int64), inputs.cache_lengths.astype(np.int64)
    starts, new = offsets[:-1], offsets[1:] - offsets[:-1]
    positions = np.arange(len(inputs.tokens)) - np.repeat(starts - cached, new)
    ends: np.ndarray = np.minimum(positions + 1 + after, np.repeat(cached + new, new)).astype(np.int32)
    return ends


def page_table(pages: Sequence[Sequence[int]], width: int | None = None) -> np.ndarray:
    """The lookup table `[B, width]` uint32 of the pages of `B` requests, as wide as the longest where it is None."""
    most = max(map(len, pages), default=0) if width is None else width
    table = np.full((len(pages), most), NO_PAGE, np.uint32)
    for row, owned in zip(table, pages, strict=True):
        row[: len(owned)] = owned
    return table
