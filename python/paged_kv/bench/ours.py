"""The package on each kind of case, on operands prepared before."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType

from paged_kv import reference
from paged_kv.arrays.cache_storage import cache_operands, paged_views
from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.bench.case_kinds import Case, ExpertCase, QuantisedCase, StepCase
from paged_kv.bench.peers.base import Peer, repeat
from paged_kv.bench.problems import (
    AppendProblem,
    Array,
    AttentionProblem,
    ExpertProblem,
    LinearProblem,
    StepProblem,
    bits,
    llama_config,
    numbers,
)
from paged_kv.graphs import ops
from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.mixture import Experts
from paged_kv.graphs.rope import Rope
from paged_kv.options import CODE_DTYPES, AttentionOptions, stored_dtype, stored_head
from paged_kv.runtime.host_calls import Weight, multiply
from paged_kv.runtime.session import Runtime, default_runtime
from paged_kv.runtime.variants import Variant


class Ours(Peer):
    """Base of all kinds; `memory` is what the bandwidth is measured on."""

    name = "paged-kv"
    memory: Array
    """The memory that runs read (append: write), all copies: bandwidth is measured on the same memory."""

    def available(self, case: Case) -> str | None:  # noqa: ARG002
        return None


def page_table(owned: list[int], rng: np.random.Generator) -> Array:
    """`[B, max_pages]` uint32: shuffled pages, each owned by one request; the rest is a page that no pool has."""
    pages = rng.permutation(sum(owned)).astype(np.uint32)
    table = np.full((len(owned), max(owned)), 0xFFFFFFFF, np.uint32)
    for row, own in zip(table, np.split(pages, np.cumsum(owned)[:-1]), strict=True):
        row[: len(own)] = own
    return table


def pool(
    layout: str, copies: int, pages: int, page: tuple[int, int, int], dtype: np.dtype[Any]
) -> tuple[Array, list[Any]]:
    """Storage for `copies` caches of `pages` pages `(page_size, Hk, D)`, and each cache's K and V as NHD views."""
    size, heads, dim = page
    if layout == "MAX":
        blocks = np.empty((pages, 2, copies, size, heads, dim), dtype)  # [pages, 2, layers, page_size, Hk, D]
        return blocks, [(blocks[:, 0, layer], blocks[:, 1, layer]) for layer in range(copies)]
    shape = (size, heads, dim) if layout == "NHD" else (heads, size, dim)
    blocks = np.empty((copies, pages, 2, *shape), dtype)
    return blocks, [paged_views(cache, layout) for cache in blocks]


def fill_pages(problem: AttentionProblem, table: Array, *views: Array) -> None:
    """Writes the tokens into their pages: `views` are K and V of a cache."""
    case = problem.case
    for row, begin, length in zip(table, problem.indptr[:-1], case.lengths, strict=True):
        whole, rest = divmod(length, case.page_size)
        page = (whole, case.page_size, *problem.k.shape[1:])
        for view, tokens in zip(views, (problem.k, problem.v), strict=True):
            own = bits(tokens)[begin : begin + length]
            bits(view)[row[:whole]] = own[: length - rest].reshape(page)
            if rest:
                bits(view)[row[whole], :rest] = own[length - rest :]


class OursAttention(Ours):
    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        case = problem.case
        self._variant = Variant("attention", DType[case.dtype], DType[stored_dtype(case.kv_dtype)])
        self._runtime = default_runtime()
        self._runtime.load([self._variant])
        owned = [-(-length // case.page_size) for length in case.lengths]
        page = (case.page_size, *problem.k.shape[1:])
        blocks, views = pool(case.layout, copies, sum(owned), page, problem.k.dtype)
        self.memory = blocks
        none = np.zeros(0, np.float32)
        rows = [problem.q, problem.row_batch, problem.row_lengths]
        numbers = AttentionOptions(rope_theta=case.rope_theta).numbers(case.head_dim)
        options = [none, none, np.array(-1, np.int32), numbers]
        rng = np.random.default_rng(1)
        self._inputs: list[list[Any]] = []
        for k_view, v_view in views:
            table = page_table(owned, rng)
            fill_pages(problem, table, k_view, v_view)
            k, v, view = cache_operands(k_view, v_view)
            self._inputs.append([*rows, k, v, table, view, *options])

    def overhead(self, repeats: int = 200) -> list[float]:
        """Seconds of executions of the same graph for one row of one token: what the times hold besides the kernel."""
        q, _, _, *rest = self._inputs[0]
        one = [np.array([value], np.int32) for value in (0, 1)]
        first = np.ascontiguousarray(q[:1])
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._runtime.execute(self._variant, first, *one, *rest)
            times.append(time.perf_counter() - start)
        return times

    def recompiled(self) -> OursAttention:
        """The same operands, with kernels from where `ops.kernels` is now."""
        other = copy(self)
        other._runtime = Runtime(ops.kernels())
        return other

    def run(self, i: int) -> None:
        self._o = self._runtime.execute(self._variant, *self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return self._o


class OursBfloat16(OursAttention):
    """The same tokens in a bfloat16 cache, for what a float8 one or one of codes gains."""

    name = "our own bf16 KV"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        wide = AttentionProblem.__new__(AttentionProblem)
        wide.__dict__ |= problem.__dict__
        wide.case = replace(problem.case, kv_dtype="bfloat16")
        wide.k, wide.v = (_in_bfloat16(array) for array in (problem.k, problem.v))
        super().prepare(wide, copies)


def _in_bfloat16(tokens: Array) -> Array:
    out = np.empty((*tokens.shape[:2], numbers(tokens[:1]).shape[2]), np.dtype("bfloat16"))
    for start in range(0, len(tokens), 2**13):
        out[start : start + 2**13] = numbers(tokens[start : start + 2**13]).astype(np.float32)
    return out


class OursOneToken(OursAttention):
    """A decode step over the same tokens: the last row of each request alone, for what further new tokens cost."""

    name = "our own, 1 new token"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        super().prepare(problem, copies)
        self._shape = problem.q.shape
        rows = (problem.q, problem.row_batch, problem.row_lengths)
        new = problem.case.new_tokens
        self._steps = [[np.ascontiguousarray(array[i::new]) for array in rows] for i in range(new)]

    def run(self, i: int) -> None:
        self._attend(self._steps[-1], i)

    def _attend(self, rows: list[Array], i: int) -> Array:
        return self._runtime.execute(self._variant, *rows, *self._inputs[i % len(self._inputs)][3:])[0]

    def output(self) -> Array:
        """Return the output of all rows, in a call for each new token."""
        steps = [self._attend(rows, 0) for rows in self._steps]
        return np.stack(steps, axis=1).reshape(self._shape)


class OursRotated(OursAttention):
    """Keys that were rotated before they were stored, for what it costs to rotate them when they are read."""

    name = "our own, rotated in the cache"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        stored = AttentionProblem.__new__(AttentionProblem)
        stored.__dict__ |= problem.__dict__
        stored.case = replace(problem.case, rope_theta=None)
        stored.q, stored.k = problem.rotated
        super().prepare(stored, copies)


class OursAppend(Ours):
    def prepare(self, problem: AppendProblem, copies: int) -> None:
        case = problem.case
        codes = case.kv_dtype in CODE_DTYPES
        kind = {2: DType.uint16, 4: DType.uint32}[problem.k.itemsize]  # append moves bits
        self._variant = Variant("append", kind, kind)
        if codes:
            self._variant = Variant("append", DType[case.dtype], DType[stored_dtype(case.kv_dtype)])
        self._runtime = default_runtime()
        self._runtime.load(self._variant.family())
        owned = [-(-(case.context + case.tokens) // case.page_size)] * case.batch
        page = (case.page_size, case.kv_heads, stored_head(case.kv_dtype, case.head_dim))
        dtype = np.dtype(stored_dtype(case.kv_dtype))
        blocks, self._views = pool("NHD", copies, sum(owned), page, dtype)
        bits(blocks)[:] = 0xFF  # NaN: what append leaves out shows
        self.memory = blocks
        self._problem, self._table = problem, page_table(owned, np.random.default_rng(1))
        # The new tokens rotate as well, or they would stay in the cache.
        new = [repeat(bits(array), copies) for array in (problem.k, problem.v)]
        at = [problem.batch_indices, problem.positions]
        self._inputs: list[list[Any]] = []
        for k, v, views in zip(*new, self._views, strict=True):
            k_view, v_view = views if codes else (bits(array) for array in views)
            k_blocks, v_blocks, view = cache_operands(k_view, v_view)
            rows = [row.view(problem.k.dtype) if codes else row for row in (k, v)]
            self._inputs.append([*rows, *at, k_blocks, v_blocks, self._table, view])

    def run(self, i: int) -> None:
        self._latest = i % len(self._inputs)
        self._runtime.execute(self._variant, *self._inputs[self._latest])

    def output(self) -> Array:
        problem, size = self._problem, self._problem.case.page_size
        pages = self._table[problem.batch_indices, problem.positions // size]
        return np.stack([view[pages, problem.positions % size] for view in self._views[self._latest]])


class OursBfloat16Append(OursAppend):
    """The same tokens into a bfloat16 cache, for what quantising costs."""

    name = "our own bf16 append"

    def prepare(self, problem: AppendProblem, copies: int) -> None:
        wide = copy(problem)
        wide.case = replace(problem.case, kv_dtype="bfloat16")
        self._kv_dtype = problem.case.kv_dtype
        super().prepare(wide, copies)

    def output(self) -> Array:
        """As the codes that these tokens become."""
        return reference.quantised(super().output(), self._kv_dtype)


class OursLinear(Ours):
    _sources: Path | None = None

    def prepare(self, problem: LinearProblem, copies: int) -> None:
        self._kind = "linear"
        self._encoding = self._mask = 0
        if isinstance(problem.case, QuantisedCase):
            self._encoding, self._kind = ENCODINGS.index(problem.case.encoding), "quantised_linear"
            self._mask = 1 << self._encoding
        self.memory = repeat(problem.w, copies)
        self._x, self._weights = problem.x, [[Weight(w, self._encoding)] for w in self.memory]

    def recompiled(self) -> OursLinear:
        """The same operands, with kernels from where `ops.kernels` is now."""
        other = copy(self)
        other._sources = ops.kernels()
        return other

    def run(self, i: int) -> None:
        w = self._weights[i % len(self._weights)]
        (self._y,) = multiply(self._kind, self._x, w, mask=self._mask, sources=self._sources)

    def output(self) -> Array:
        return self._y


class OursExperts(Ours):
    def prepare(self, problem: ExpertProblem, copies: int) -> None:
        case = problem.case
        self.memory = repeat(problem.w, copies)
        encoding = 0 if case.encoding is None else ENCODINGS.index(case.encoding)
        self._mask = 0 if case.encoding is None else 1 << encoding
        self._x, self._stacks = problem.x, [[Weight(w, encoding)] for w in self.memory]
        self._experts = [problem.experts(run).reshape(-1) for run in range(case.experts // case.chosen)]

    def run(self, i: int) -> None:
        turn, chosen = divmod(i, len(self._experts))
        w = self._stacks[turn % len(self._stacks)]
        kind = "quantised_experts" if self._mask else "experts"
        (self._y,) = multiply(kind, self._x, w, self._experts[chosen], mask=self._mask)

    def output(self) -> Array:
        self.run(0)
        return self._y


class OursBfloat16Experts(OursExperts):
    """As many experts of the same sizes, in bfloat16."""

    name = "our own bf16 experts"

    def available(self, case: Case) -> str | None:
        return None if isinstance(case, ExpertCase) else "no such case"

    def prepare(self, problem: ExpertProblem, copies: int) -> None:  # noqa: ARG002
        case = replace(problem.case, dtype="bfloat16", encoding=None)
        self._other = ExpertProblem(case, 0)
        super().prepare(self._other, case.copies)

    def error(self, problem: Any) -> float:  # noqa: ARG002
        return self._other.error(self.output())


def decoder_config(case: StepCase) -> DecoderConfig:
    """Return the configuration of the model of a step."""
    sizes = llama_config(case)
    rope = Rope(case.head_dim, sizes.pop("rope_theta"))
    blocks_of = {name: case.encoding(name) for name, shape in case.shapes().items() if len(shape) > 1}
    encodings = tuple((name, encoding) for name, encoding in blocks_of.items() if encoding is not None)
    experts = None
    if case.experts:
        experts = Experts(
            count=case.experts,
            chosen=case.chosen,
            inner=case.intermediate,
            layers=(True,) * case.layers,
            sums_to_one=True,
            apart=True,
        )
    return DecoderConfig(
        **sizes,
        rope=rope,
        qk_norm="head" if case.experts else None,
        experts=experts,
        bos_token_id=None,
        eos_token_ids=(),
        encodings=encodings,
        float32_activations=bool(encodings),
    )


class OursStep(Ours):
    """`DecoderModel.step`: everything between a step's tokens and its logits, Python included."""

    def prepare(self, problem: StepProblem, copies: int) -> None:  # noqa: ARG002
        from paged_kv.engine.model import DecoderModel

        case = problem.case
        owned = [-(-(case.context + case.tokens) // case.page_size)] * case.batch
        weights = {name: to_buffer(array) for name, array in problem.weights.items()}
        dtype, pages = DType[case.dtype], sum(owned)
        self._model = DecoderModel(
            decoder_config(case), weights, dtype=dtype, num_pages=pages, page_size=case.page_size
        )
        table = page_table(owned, np.random.default_rng(1))
        # [pages, 2, layers, page_size, Hk, D]
        blocks = bits(to_numpy(self._model._blocks))
        blocks[:] = 0
        whole = case.context // case.page_size
        for request, row in enumerate(table):
            for which, tokens in enumerate((problem.k, problem.v)):
                own = bits(tokens)[:, request].reshape(case.layers, whole, case.page_size, case.kv_heads, case.head_dim)
                blocks[row[:whole], which] = own.swapaxes(0, 1)
        self._step = (
            problem.tokens.tolist(),
            [case.context] * case.batch,
            [[int(page) for page in row] for row in table],
        )
        self.memory = problem.memory

    def run(self, i: int) -> None:  # noqa: ARG002
        self._logits = self._model.step(*self._step)

    def output(self) -> Array:
        return self._logits


OTHERS = {
    "PrefillCase": "wrappers:OursPrefill",
    "CascadeCase": "wrappers:OursCascade",
    "LatentCase": "latent:OursLatent",
}
"""Those that build on the classes above, by the kind of case."""


def make_ours(case: Case) -> Ours:
    """The package on a kind of case."""
    kinds: dict[str, type[Ours]] = {
        "AttentionCase": OursAttention,
        "AppendCase": OursAppend,
        "LinearCase": OursLinear,
        "QuantisedCase": OursLinear,
        "ExpertCase": OursExperts,
        "StepCase": OursStep,
    }
    kind = type(case).__name__
    if kind in kinds:
        return kinds[kind]()
    module, _, name = OTHERS[kind].partition(":")
    ours: Ours = getattr(import_module(f"paged_kv.bench.{module}"), name)()
    return ours
