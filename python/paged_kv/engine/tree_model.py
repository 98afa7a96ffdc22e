"""Speculative decoding: steps that check trees of candidate tokens, with the model's first layers as a draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.engine import Model
from max.graph import KernelLibrary, Module

from paged_kv.arguments import integer
from paged_kv.arrays.host import to_buffer
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.step import StepGraph, read
from paged_kv.errors import ContractError, ShapeError
from paged_kv.graphs.inputs import step_inputs
from paged_kv.graphs.models import tree_step
from paged_kv.graphs.trees import LARGEST_TREE
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import MODELS, CompileKey
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.forks import check_not_forked
from paged_kv.runtime.graph_reading import UnknownGraph
from paged_kv.runtime.program import Program
from paged_kv.runtime.session import Runtime, default_runtime

logger = logging.getLogger("paged_kv.engine")
_STEP, _DRAFT, _MOVES = "tree_step", "tree_draft", "tree_moves"


def tree_graphs(
    of: StepGraph, runtime: Runtime, *, draft_layers: int | None = None, largest_tree: int = LARGEST_TREE
) -> tuple[dict[str, CompileKey], Callable[..., None]]:
    """Return the keys of the graphs of a `TreeModel` by their names, and what adds named ones to a module, with a
    library of kernels where they are only read.

    Args:
        of: The step of the model that is decoded.
        draft_layers, largest_tree: As in `TreeModel`.

    Raises:
        ContractTypeError, ContractError: as `TreeModel`.
    """
    config, dtype, kv_format = of.geometry, of.dtype, of.kv_format
    largest_tree = integer("largest_tree", largest_tree, 1)
    layers: dict[str, int | None] = {_STEP: None}
    if draft_layers is not None:
        layers[_DRAFT] = integer("draft_layers", draft_layers, 1, config.num_hidden_layers)
    facts = f"{dtype.name} {kv_format or ''} largest_tree={largest_tree} {config}"

    def build(module: Module, names: Sequence[str], library: KernelLibrary | None = None) -> None:
        for name in names:
            if name == _MOVES:
                tree_step.build_moves(
                    config, dtype, module, runtime.device, name=name, kv_format=kv_format, library=library
                )
            else:
                tree_step.build_tree_step(
                    config,
                    dtype,
                    module,
                    runtime.device,
                    name=name,
                    layers=layers[name],
                    largest_tree=largest_tree,
                    kv_format=kv_format,
                    library=library,
                )

    keys = {
        name: CompileKey(f"{name} layers={layers.get(name)} {facts}", (MODELS,), runtime.architecture)
        for name in (*layers, _MOVES)
    }
    return keys, build


class TreeModel:
    """Steps of trees over the pages of a `DecoderModel`, whose weights and cache it shares.

    A request's rows are `tokens`, each with a parent among them: `parents[i] < i`, or -1 for the last cached token. Row
    i is appended to slot `cache_length + i`. So the tokens of a prompt, each the parent of the next, are a tree too.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        draft_layers: int | None = None,
        largest_tree: int = LARGEST_TREE,
        on_compile: Callable[[], None] = lambda: None,
        runtime: Runtime | None = None,
    ) -> None:
        """Makes the steps programs; on a GPU, and where no program knows them, compiles them or reads them from disk.

        Args:
            model: What is decoded.
            draft_layers: Layers of the draft, the model's first ones; without it there is no draft.
            largest_tree: Rows that a request with branches may bring to a step.
            on_compile: As in `DecoderModel`.
            runtime: That of `model`.

        Raises:
            ContractTypeError, ContractError: `draft_layers` is no integer from 1 to the model's layers, or
                `largest_tree` none from 1 on.
            ContractError: the model's pages hold latents; its layers with windows have pages of their own; or it has
                recurrent layers, whose states know no branches.
        """
        if model.geometry.recurrence is not None:
            raise ContractError("model: a model with recurrent layers has no trees")
        if model.geometry.latent is not None:
            raise ContractError("model: trees run over pages of K and V, not of latents")
        if model.geometry.windows_apart:
            raise ContractError("model: trees run over pages of all layers: make it with num_window_pages=0")
        self.model = model
        runtime = runtime or default_runtime()
        step = StepGraph(model.geometry, model.dtype, model.kv_format)
        keys, build = tree_graphs(step, runtime, draft_layers=draft_layers, largest_tree=largest_tree)
        self._gpu = runtime.driver_device if runtime.device.is_gpu() else None
        self._programs: dict[str, Program] = {}
        self._models: dict[str, Model] = {}
        if self._gpu is None:
            try:
                self._programs = {name: self._program(name, build) for name in keys}
            except UnknownGraph as unknown:
                logger.info("steps of trees are compiled by MAX: %s", unknown)
        if not self._programs:
            self._models = load_graphs(
                runtime.session, keys, build, weights=model.buffers_of_weights(), on_compile=on_compile
            )

    def _program(self, name: str, build: Callable[..., None]) -> Program:
        buffers: list[Any] = [None] * 4 + [self.model.blocks]
        if name != _MOVES:
            buffers.append(None)
        graph = read(lambda module, library: build(module, [name], library), buffers)
        return Program(graph, {each: self.model.weights[each] for each in graph.weights}, buffers)

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        draft: bool = False,
    ) -> list[np.ndarray]:
        """Appends each request's tree to the cache; logits `[rows, vocab]` float32 after each row, a request each.

        Args:
            tokens, parents: The tree of each of `B` requests, at least one row.
            cache_lengths: Tokens that each request has in the cache.
            pages: Page ids of each request, enough for its tree too.
            draft: Computes the draft's layers alone, and only their K and V.

        Raises:
            ContractError: a token is not in the vocabulary, or there is no draft.
            ShapeError: a request has not as many parents as tokens.
            ValueError: what the ops refuse, a parent that is no earlier row for one.
            ToolchainError: this process was forked off one in which MAX ran.
        """
        check_not_forked()
        self.model.check_tokens(tokens)
        if draft and _DRAFT not in (self._programs or self._models):
            raise ContractError("draft: this model was made without draft_layers")
        for request, (new, of_request) in enumerate(zip(tokens, parents, strict=True)):
            if len(new) != len(of_request):
                raise ShapeError(f"parents: request {request} has {len(of_request)}, and {len(new)} tokens")
        inputs = step_inputs(tokens, cache_lengths, pages, self.model.blocks)
        flat = np.fromiter((parent for of_request in parents for parent in of_request), np.int32)
        arguments = [*inputs.flatten(), flat]
        (logits,) = self._execute(_DRAFT if draft else _STEP, arguments)
        return np.split(logits, inputs.row_offsets[1:-1])

    def keep(self, rows: Sequence[Sequence[int]], cache_lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Keeps the rows of each request's last tree that are a path from its root, in ascending order.

        Their K and V move to slots `cache_length` and on, where the next step's `cache_lengths` count them; the other
        rows' slots are free for what follows.
        """
        check_not_forked()
        moves = [
            (request, length + row, length + m)
            for request, (kept, length) in enumerate(zip(rows, cache_lengths, strict=True))
            for m, row in enumerate(kept)
            if m != row
        ]
        if moves:
            inputs = step_inputs([[0]] * len(pages), cache_lengths, pages, self.model.blocks)
            columns = np.array(moves, np.int32).T.copy()
            self._execute(_MOVES, [*columns, inputs.lookup_table, self.model.blocks])

    def _execute(self, name: str, arguments: Sequence[np.ndarray | Buffer]) -> list[np.ndarray]:
        if self._programs:
            return self._programs[name].run(self.model.brought(arguments))
        buffers = [to_buffer(argument) for argument in arguments]
        if self._gpu is not None:
            buffers = [buffer if buffer is self.model.blocks else buffer.to(self._gpu) for buffer in buffers]
        return [result.to(CPU()).to_numpy() for result in execute(self._models[name].execute, *buffers)]
