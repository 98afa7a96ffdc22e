"""A checkpoint, compiled and bound to its weights, with the pages of its cache."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import Model

from paged_kv.arguments import integer, shown
from paged_kv.arrays.dtypes import numpy_dtype
from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.checkpoint.draft_layers import DraftSource
from paged_kv.checkpoint.gguf import Dequantise
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import OnProgress
from paged_kv.engine.adapters import Adapters
from paged_kv.engine.draft_layer import DraftLayer, draft_weights, places
from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.page_file import Bits
from paged_kv.engine.run_record import RunRecord
from paged_kv.engine.step import StepGraph
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.graphs.inputs import WindowInputs, page_table, state_inputs, step_inputs, window_lengths
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.adapters import AdapterStacks, stack_dtype
from paged_kv.graphs.models.config import DecoderConfig, with_cache_rotation, with_separate_windows
from paged_kv.graphs.ops import cache_dtype
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation, check_kv_format
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import Sources, digests_of
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.forks import check_not_forked
from paged_kv.runtime.graph_reading import UnknownGraph
from paged_kv.runtime.host_calls import dequantise
from paged_kv.runtime.program import Program, Watch
from paged_kv.runtime.session import Runtime, default_runtime
from paged_kv.runtime.step_profile import StepProfile

logger = logging.getLogger("paged_kv.engine")
Storage: TypeAlias = np.ndarray | Buffer
"""The pages of a model: an array in the host's memory, or a Buffer on a GPU."""

LEAST_STATES = 16
"""Slots of state of a hybrid model, unless it is told otherwise: a request has one or two."""


class DecoderModel:
    """Runs decode steps. It owns the storage of the pages; the caller knows which request owns which page."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, np.ndarray],
        *,
        dtype: DType,
        num_pages: int,
        page_size: int,
        num_states: int | None = None,
        num_window_pages: int | None = None,
        on_compile: Callable[[], None] = lambda: None,
        runtime: Runtime | None = None,
        kv_format: KVFormat | None = None,
        cache_rotation: CacheRotation | None = None,
        layer_names: Mapping[str, str] = MappingProxyType({}),
        draft: DraftSource | None = None,
        output: decoder.Output = "logits",
    ) -> None:
        """Compiles the step, or reads it from disk, and binds `weights` without copying them.

        Args:
            weights: By checkpoint name, as `Source.load` gives them for `dtype`; they must outlive the model.
            dtype: The dtype of weights, activations and cache; of the cache alone where weights are quantised.
            num_pages: Pages of the cache; memory is used as pages are first written.
            num_states: Slots for the states of recurrent layers, where the model has some; `default_states` where None.
            num_window_pages: Pages for the K and V of layers with windows alone, where other layers have none; as many
                as the others where None. 0: each page has K and V of all layers.
            on_compile: Called before a compile (some 20 s, once per model geometry and machine).
            runtime: The runtime of the device that the model runs on; the CPU's where None. Weights stay on the host
                until MAX copies them to a GPU.
            kv_format: "int8" or "int4": the cache holds codes with a scale a token and KV head.
            cache_rotation: "hadamard": q and k take a Walsh-Hadamard transform before the cache, for few bits.
            layer_names: Names that layers have in the checkpoint's files, and the step's, for adapters.
            draft: A layer that drafts tokens (`draft_layers`), which takes the model's hidden states; K and V of one
                layer more are in its pages then.
            output: What `step` returns: "logits", or "hidden", normed hidden states, for which no head is read.

        Raises:
            CheckpointError: tokens of the model see those after them, and logits are asked for.
            ContractTypeError: `num_pages`, `page_size`, `num_states` or `num_window_pages` is no integer.
            ContractError: one of them is negative, there are fewer pages for windows than a request needs, or they do
                not fit into memory; `kv_format` is unknown, or the model has latents; the model cannot have that
                `cache_rotation`; it has recurrent layers or a draft layer, and the device is a GPU.
            ToolchainError: as `load_graphs`.
        """
        num_pages, page_size = integer("num_pages", num_pages, 0), integer("page_size", page_size, 1)
        config = with_cache_rotation(config, cache_rotation)
        if not config.causal and output == "logits":
            raise CheckpointError("use_bidirectional_attention: expected false of a model that generates, got true")
        if num_window_pages is None or integer("num_window_pages", num_window_pages, 0):
            config = with_separate_windows(config)
        self.config = config
        self.weights = weights
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.kv_format = kv_format
        check_kv_format(kv_format)
        runtime = runtime or default_runtime()
        self._gpu = runtime.driver_device if runtime.device.is_gpu() else None
        if draft is not None:
            if self._gpu is not None:
                raise ContractError("speculate: a draft layer runs on the CPU alone")
            draft = replace(draft, config=with_cache_rotation(draft.config, cache_rotation))
        of_draft = None if draft is None else draft.config
        self._step = step = StepGraph.of(config, dtype, kv_format, draft=of_draft, output=output)
        self.geometry = step.geometry
        new_cache = partial(_new_cache, config, page_size, dtype, kv_format, self._gpu)
        self._element_bytes = cache_dtype(dtype, kv_format).size_in_bytes
        self._blocks = new_cache(num_pages)
        self.hidden = np.empty((0, config.hidden_size), np.float32)
        """With a draft layer the hidden states that it takes, of all tokens of the last step, `[T, hidden]`."""
        self.draft_layer: DraftLayer | None = None
        self._draft_width = 0  # of the graph's input `places`
        if draft is not None:
            own = draft_weights(draft.load(dtype, weights, _dequantise(draft.config)))
            blocks = _new_cache(draft.config, page_size, dtype, kv_format, None, num_pages)
            assert isinstance(blocks, np.ndarray)
            self.draft_layer = DraftLayer(draft, own, dtype, kv_format, blocks, config.vocab_size)
            self.weights = weights = {**weights, **own}
            self._draft_width = len(draft.head.layers)
        self.num_window_pages = 0
        self._window_blocks: Storage | None = None
        if config.separate_windows:
            least = min(num_pages, least_window_pages(config.longest_window, page_size))
            count = num_pages if num_window_pages is None else num_window_pages
            self.num_window_pages = integer("num_window_pages", count, least)
            self._window_blocks = new_cache(self.num_window_pages, windows=True)
        self.num_states = 0
        if config.recurrence is not None:
            if self._gpu is not None:
                raise ContractError("runtime: a model with recurrent layers runs on the CPU alone")
            usual = default_states(num_pages, self.page_bytes, decoder.state_bytes(config))
            self.num_states = usual if num_states is None else integer("num_states", num_states, 2)
        self._states = [_new_states(shape) for shape in decoder.state_shapes(config, self.num_states)]
        self._keys = step.keys(runtime.architecture)
        self._profiles: tuple[StepProfile, StepProfile] | None = None
        self._watch: Watch | None = None
        self._program: Program | None = None
        if self._gpu is None:
            try:
                self._program = step.program(weights, self._input_buffers())
            except UnknownGraph as unknown:
                if draft is not None:
                    raise
                logger.info("the step is compiled by MAX: %s", unknown)
        if self._program is None:
            models = load_graphs(
                runtime.session,
                self._keys,
                lambda module, _: step.build(module, runtime.device),
                weights=self.buffers_of_weights(),
                on_compile=on_compile,
            )
            self._model: Model = models[decoder.STEP]
        self._adapters = Adapters(config, numpy_dtype(stack_dtype(config, dtype)), self._with_adapters, layer_names)

    @property
    def adapters(self) -> Adapters:
        """Its LoRA adapters.

        Raises:
            ContractError: MAX runs the steps.
        """
        if self._program is None:
            raise ContractError("adapters: the steps of this model are compiled by MAX, which adds none")
        return self._adapters

    def _with_adapters(self, sizes: AdapterStacks, stacks: Mapping[str, np.ndarray]) -> Program:
        """The step that adds adapters."""
        step = replace(self._step, adapters=sizes)
        return step.program({**self.weights, **stacks}, [*self._input_buffers(), None])

    def buffers_of_weights(self) -> dict[str, Buffer]:
        """The weights as MAX takes them; their memory is not copied."""
        return {name: to_buffer(weight) for name, weight in self.weights.items()}

    def _input_buffers(self) -> list[np.ndarray | None]:
        """For each input of the step's graph the storage that it is, or None."""
        inputs: list[Any] = [None] * 4 + [self._blocks]
        if self._window_blocks is not None:
            inputs += [None, self._window_blocks]
        if self._states:
            inputs += [None] * 4 + self._states
        return [*inputs, *[None] * (1 + self.config.has_window_lengths + bool(self._draft_width))]

    @classmethod
    def from_folder(
        cls,
        folder: Path | str | Source,
        *,
        dtype: DType,
        num_pages: int,
        page_size: int = 16,
        num_states: int | None = None,
        num_window_pages: int | None = None,
        on_progress: OnProgress | None = None,
        on_compile: Callable[[], None] = lambda: None,
        runtime: Runtime | None = None,
        kv_format: KVFormat | None = None,
        cache_rotation: CacheRotation | None = None,
        draft: DraftSource | None = None,
        output: decoder.Output = "logits",
    ) -> DecoderModel:
        """The model of a Hugging Face folder or a GGUF file, or one that is open already; its weights are memory-mapped
        and converted only where they must be.

        Raises:
            CheckpointError: there is no checkpoint that this package runs.
            ContractTypeError, ContractError: as for `DecoderModel`.
        """
        runtime = default_runtime() if runtime is None else runtime
        source = (folder if isinstance(folder, Source) else open_source(folder)).on(runtime.device)
        weights = source.load(dtype, on_progress, _dequantise(source.config))
        return cls(
            source.config,
            weights,
            dtype=dtype,
            num_pages=num_pages,
            page_size=page_size,
            num_states=num_states,
            num_window_pages=num_window_pages,
            on_compile=on_compile,
            runtime=runtime,
            kv_format=kv_format,
            cache_rotation=cache_rotation,
            layer_names=source.layer_names(),
            draft=draft,
            output=output,
        )

    @property
    def blocks(self) -> Storage:
        """The storage of the pages: `[pages, 2, layers, page_size, Hk, D]`, or what `decoder.cache_shape` says: an
        array on the host, a Buffer on a GPU.
        """
        return self._blocks

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers, or their latents; without the layers that have pages apart. With a
        draft layer its K and V too, and a hidden state.
        """
        return math.prod(self.page_kind[1]) * self._element_bytes

    @property
    def window_page_bytes(self) -> int:
        """Bytes of one page of the layers with windows; 0 where they have none of their own."""
        return 0 if self._window_blocks is None else math.prod(self.window_page_kind[1]) * self._element_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights and of the geometry, in hexadecimal: some 0.6 s a gigabyte, once."""
        layers = self.geometry if self.draft_layer is None else (self.geometry, self.draft_layer.config)
        digest = hashlib.sha256(f"{layers} {self.page_kind[0]}".encode())
        for name in sorted(self.weights):
            array = self.weights[name]
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    @cached_property
    def kernels(self) -> str:
        """The name of the step's artefact: its sources, compilers and CPU."""
        return digests_of(self._keys, Sources.installed())[decoder.STEP]

    @property
    def page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The dtype of a page's elements, or of its codes, and its shape; one dimension with a draft layer."""
        shape = tuple(self._blocks.shape)[1:]
        if self.draft_layer is not None:
            shape = (math.prod(shape) + self.draft_layer.page_bytes // self._element_bytes,)
        return self.kv_format or self._blocks.dtype.name, shape

    @property
    def window_page_kind(self) -> tuple[str, tuple[int, ...]]:
        """The same of a page of the layers with windows."""
        return self.page_kind[0], tuple(self._cache(windows=True).shape)[1:]

    def read_pages(self, pages: Sequence[int], *, windows: bool = False) -> Bits:
        """The bits of some pages, or of some of the layers with windows, as unsigned integers, `[n, ...]`."""
        cache = self._cache(windows)
        if isinstance(cache, np.ndarray):
            bits: Bits = cache.view(f"u{cache.dtype.itemsize}")[list(pages)]
            if self.draft_layer is None or cache is not self._blocks:
                return bits
            of_draft = [self.draft_layer.page_bits(page, cache.dtype.itemsize) for page in pages]
            return np.concatenate([bits.reshape(len(pages), -1), np.stack(of_draft)], axis=1)
        rows = [to_numpy(_page(cache, page).to(CPU())) for page in pages]
        return np.concatenate([row.view(f"u{row.dtype.itemsize}") for row in rows])

    def write_pages(self, pages: Sequence[int], bits: Bits, *, windows: bool = False) -> None:
        """Replaces some pages by what `read_pages` gave."""
        cache = self._cache(windows)
        if isinstance(cache, np.ndarray):
            if self.draft_layer is not None and cache is self._blocks:
                size = math.prod(cache.shape[1:])
                for page, row in zip(pages, bits, strict=True):
                    self.draft_layer.put_bits(page, row[size:])
                bits = bits[:, :size].reshape(len(pages), *cache.shape[1:])
            cache.view(bits.dtype)[list(pages)] = bits
            return
        for page, row in zip(pages, bits, strict=True):
            one = to_buffer(np.ascontiguousarray(row[None]).view(numpy_dtype(cache.dtype)))
            _page(cache, page).inplace_copy_from(one.to(cache.device))
            cache.device.synchronize()  # the copy is enqueued, and its source ends here

    def copy_page(self, source: int, target: int, *, windows: bool = False) -> None:
        """Copies a page in place, K and V of all its layers."""
        cache = self._cache(windows)
        if isinstance(cache, np.ndarray):
            cache[target] = cache[source]
            if self.draft_layer is not None and cache is self._blocks:
                self.draft_layer.copy_page(source, target)
        else:
            _page(cache, target).inplace_copy_from(_page(cache, source))

    @property
    def state_size(self) -> int:
        """Elements of a state, all float32; 0 where no layer is recurrent."""
        return decoder.state_bytes(self.config) // 4

    def read_states(self, slots: Sequence[int]) -> Bits:
        """The bits of some slots of state as unsigned integers, `[n, state_size]`."""
        parts = [states.view(np.uint32)[list(slots)] for states in self._states]
        return np.concatenate([part.reshape(len(slots), -1) for part in parts], axis=1)

    def write_states(self, slots: Sequence[int], bits: Bits) -> None:
        """Replaces some slots of state by what `read_states` gave."""
        first = 0
        for states in self._states:
            new = bits[:, first : first + states[0].size].reshape(len(slots), *states.shape[1:])
            states.view(np.uint32)[list(slots)] = new
            first += states[0].size

    def _cache(self, windows: bool) -> Storage:
        """The storage of one kind of pages."""
        return self._window_blocks if windows and self._window_blocks is not None else self._blocks

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        counts: Sequence[int] | None = None,
        states: StepStates | None = None,
        window_pages: Sequence[Sequence[int]] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Appends each request's new tokens to the cache; logits `[N, vocab]` float32 after the last of them, or
        another `output` of it.

        Args:
            tokens: At least one new token of each of `B` requests.
            cache_lengths: Tokens that each request has in the cache.
            pages: Page ids of each request, enough for the new tokens too.
            counts: After how many of its last tokens each request wants logits, at least 1 and at most all: `N` in all,
                request after request. One each where None.
            states: Where states are read and saved; needed where layers are recurrent, else None.
            window_pages: Pages of the layers with windows, where they have their own; those with the numbers of `pages`
                where None. A page that no window reaches is `NO_PAGE`.
            adapters: The index of each request's adapter, or `NO_ADAPTER`; None where no request has one.

        Raises:
            ContractError: a token is not in the vocabulary; a count is out of range.
            ToolchainError: MAX runs the step, and this process was forked off one in which it ran.
        """
        self.check_tokens(tokens)
        inputs = step_inputs(tokens, cache_lengths, pages, self._blocks)
        output_rows = (inputs.row_offsets[1:] - 1).astype(np.int32)
        if counts is not None:
            output_rows = _last_rows(inputs.row_offsets, counts)
        of_windows, of_states = [], []
        if self._window_blocks is not None:
            width = inputs.lookup_table.shape[1]
            table = page_table(pages if window_pages is None else window_pages, width)
            of_windows = WindowInputs(table, self._window_blocks).flatten()
        if self._states:
            if states is None:
                raise ContractError("states: a model with recurrent layers needs them")
            of_states = state_inputs(states.sources, states.saves, self._states).flatten()
        if self.config.has_window_lengths:
            of_states += [window_lengths(inputs, self.config.longest_window)]
        values = (*inputs.flatten(), *of_windows, *of_states, output_rows)
        program = self._program
        if adapters is not None:
            program = self.adapters.program
            assert program is not None
            of_tokens = np.repeat(np.asarray(adapters, np.int32), np.diff(inputs.row_offsets).astype(np.int64))
            values = (*values, of_tokens)
        if self._draft_width:
            values = (*values, places(len(inputs.tokens), self._draft_width))
        if program is not None:
            profile, watch = None, None  # of the model's own steps alone
            if adapters is None:
                profile = None if self._profiles is None else self._profiles[any(len(each) > 1 for each in tokens)]
                watch = self._watch
            logits, *hidden = program.run(self.brought(values), profile, watch)
            if hidden:
                (self.hidden,) = hidden
            return logits
        check_not_forked()
        arguments = [to_buffer(value) for value in values]
        if self._gpu is not None:
            caches = (self._blocks, self._window_blocks)
            arguments = [
                value if any(value is cache for cache in caches) else value.to(self._gpu) for value in arguments
            ]
        return execute(self._model.execute, *arguments)[0].to(CPU()).to_numpy()

    def brought(self, inputs: Sequence[np.ndarray | Buffer]) -> list[np.ndarray]:
        """Those inputs of a step that are others in each step: without the pages and states of this model."""
        storage = {id(each) for each in (self._blocks, self._window_blocks, *self._states)}
        return [each for each in inputs if isinstance(each, np.ndarray) and id(each) not in storage]

    def profile_steps(self) -> tuple[StepProfile, StepProfile]:
        """Notes the times of all steps until `end_profile`: of those of one token a request, and of all others.

        Raises:
            ContractError: MAX runs the steps.
        """
        if self._program is None:
            raise ContractError("the steps of this model are compiled by MAX: no kernel's time is known")
        self._profiles = self._program.new_profile(), self._program.new_profile()
        return self._profiles

    def end_profile(self) -> None:
        """Notes no times any more, once the step that runs has ended."""
        self._profiles = None
        if self._program is not None:
            self._program.wait()

    def new_record(self) -> RunRecord:
        """One that sees all results of this model's steps from now on.

        Raises:
            ContractError: MAX runs the steps.
        """
        if self._program is None:
            raise ContractError("the steps of this model are compiled by MAX: what its operations give is not seen")
        record = RunRecord(self._program.operations, self._program.inputs, self._program.outputs)
        self._watch = record.see
        return record

    def check_tokens(self, tokens: Sequence[Sequence[int]]) -> None:
        """Refuses a token that is not in the vocabulary: a graph reads its embedding wherever its id points.

        Raises:
            ContractError: the message names the request.
        """
        for request, new in enumerate(tokens):
            for token in new:
                if not 0 <= token < self.config.vocab_size:
                    expected = f"an id from 0 to {self.config.vocab_size - 1}"
                    raise ContractError(f"tokens: request {request} has {shown(token)}, expected {expected}")


def default_states(num_pages: int, page_bytes: int, state_bytes: int) -> int:
    """Slots of state beside some pages: as many as take the memory of the pages, at least 16 and no more than there
    are pages beyond these.
    """
    return min(max(LEAST_STATES, num_pages * page_bytes // state_bytes), num_pages + LEAST_STATES)


def least_window_pages(window_left: int, page_size: int) -> int:
    """Pages of layers with windows that a request needs to go on: those that the window reaches before a token, the
    token's own, and the next one.
    """
    return -(-window_left // page_size) + 2


def _dequantise(config: DecoderConfig) -> Dequantise:
    """`dequantise` of the library that has the encodings of a model."""
    return partial(dequantise, mask=sum(1 << ENCODINGS.index(each) for each in set(dict(config.encodings).values())))


def _page(cache: Buffer, page: int) -> Buffer:
    """One page of a storage, `[1, ...]`."""
    return cache[(slice(page, page + 1), *[slice(None)] * (cache.rank - 1))]


def _new_states(shape: Sequence[int | str]) -> np.ndarray:
    """Memory for states, not yet written to."""
    try:
        return np.empty([int(size) for size in shape], np.float32)
    except (MemoryError, ValueError, OverflowError):
        size = shown(4 * math.prod(map(int, shape)))
        raise ContractError(f"num_states: {shape[0]} states need {size} bytes, more than there are") from None


def _last_rows(row_offsets: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The last `counts[b]` rows of each request, as int32.

    Raises:
        ContractError: a count is below 1, or more than the request's rows.
    """
    for request, (count, rows) in enumerate(zip(counts, np.diff(row_offsets), strict=True)):
        if not 1 <= count <= rows:
            raise ContractError(f"counts: request {request} has {shown(count)}, expected 1 to {rows}")
    ends = row_offsets[1:].tolist()
    return np.concatenate(
        [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, counts, strict=True)]
    )


def _new_cache(
    config: DecoderConfig,
    page_size: int,
    dtype: DType,
    kv_format: KVFormat | None,
    gpu: Device | None,
    num_pages: int,
    *,
    windows: bool = False,
) -> Storage:
    """The storage of the pages, not yet written to."""
    shape = [int(size) for size in decoder.cache_shape(config, num_pages, page_size, kv_format, windows=windows)]
    dtype = cache_dtype(dtype, kv_format)
    try:
        return np.empty(shape, numpy_dtype(dtype)) if gpu is None else Buffer(dtype, shape, gpu)
    except (MemoryError, ValueError, OverflowError, RuntimeError):  # sizes that no array can have
        size = shown(math.prod(shape) * dtype.size_in_bytes)
        pages = f"{shown(num_pages)} pages of {shown(page_size)} tokens"
        raise ContractError(f"num_pages: {pages} need {size} bytes, more than there are") from None
