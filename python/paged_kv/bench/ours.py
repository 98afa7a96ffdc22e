"""The package on each kind of case, on operands prepared before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType

from paged_kv.arrays.pages import Pages
from paged_kv.bench.case_kinds import Case, named
from paged_kv.bench.peer import Peer, repeat
from paged_kv.bench.problems import (
    AppendProblem,
    Array,
    AttentionProblem,
    LinearProblem,
    bits,
)
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.options import NO_PAGE, AttentionOptions, stored_dtype, stored_head
from paged_kv.runtime.host_calls import LayerWeight, multiply
from paged_kv.runtime.session import Runtime, default_runtime
from paged_kv.runtime.variants import Variant


class Ours(Peer):
    """Base of all kinds; `memory` is what the bandwidth is measured on."""

    name = "paged-kv"
    memory: Array
    """The memory that runs read (append: write), all copies: bandwidth is measured on the same memory."""

    def profile(self, runs: int) -> list[str]:  # noqa: ARG002
        """The table of some more runs, by operation and by layer; nothing where no model runs."""
        return []


def page_table(owned: list[int], rng: np.random.Generator) -> Array:
    """`[B, max_pages]` uint32: shuffled pages, each owned by one request; the rest is a page that no pool has."""
    pages = rng.permutation(sum(owned)).astype(np.uint32)
    table = np.full((len(owned), max(owned)), NO_PAGE, np.uint32)
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
    return blocks, [(pages.k, pages.v) for pages in (Pages.of(cache, layout) for cache in blocks)]


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
    runtime: Runtime

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        case = problem.case
        self._variant = Variant("attention", DType[case.dtype], DType[stored_dtype(case.kv_dtype)])
        self.runtime = default_runtime()
        self.runtime.load([self._variant])
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
            k, v, view = Pages(k_view, v_view).operands()
            self._inputs.append([*rows, k, v, table, view, *options])

    def run(self, i: int) -> None:
        self._o = self.runtime.execute(self._variant, *self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return self._o


class OursAppend(Ours):
    def prepare(self, problem: AppendProblem, copies: int) -> None:
        case = problem.case
        codes = case.kv_dtype in CODE_DTYPES
        kind = {2: DType.uint16, 4: DType.uint32}[problem.k.itemsize]  # append moves bits
        self._variant = Variant("append", kind, kind)
        if codes:
            self._variant = Variant("append", DType[case.dtype], DType[stored_dtype(case.kv_dtype)])
        self._runtime = default_runtime()
        self._runtime.load(self._variant.bundle())
        owned = [-(-(case.context + case.tokens) // case.page_size)] * case.batch
        page = (case.page_size, case.kv_heads, stored_head(case.kv_dtype, case.head_dim))
        dtype = np.dtype(stored_dtype(case.kv_dtype))
        blocks, self._views = pool("NHD", copies, sum(owned), page, dtype)
        bits(blocks)[:] = 0xFF  # NaN: what append leaves out shows
        self.memory = blocks
        self._problem, self._table = problem, page_table(owned, np.random.default_rng(1))
        # The new tokens take turns as well, or they would stay in the cache.
        new = [repeat(bits(array), copies) for array in (problem.k, problem.v)]
        at = [problem.batch_indices, problem.positions]
        self._inputs: list[list[Any]] = []
        for k, v, views in zip(*new, self._views, strict=True):
            k_view, v_view = views if codes else (bits(array) for array in views)
            k_blocks, v_blocks, view = Pages(k_view, v_view).operands()
            rows = [row.view(problem.k.dtype) if codes else row for row in (k, v)]
            self._inputs.append([*rows, *at, k_blocks, v_blocks, self._table, view])

    def run(self, i: int) -> None:
        self._latest = i % len(self._inputs)
        self._runtime.execute(self._variant, *self._inputs[self._latest])

    def output(self) -> Array:
        problem, size = self._problem, self._problem.case.page_size
        pages = self._table[problem.batch_indices, problem.positions // size]
        return np.stack([view[pages, problem.positions % size] for view in self._views[self._latest]])


class OursLinear(Ours):
    sources: Path | None = None
    """The Mojo package that its kernel is compiled from; None: the installed one."""

    def prepare(self, problem: LinearProblem, copies: int) -> None:
        self.memory = repeat(problem.w, copies)
        self._x, self._weights = problem.x, [[LayerWeight(w)] for w in self.memory]

    def run(self, i: int) -> None:
        (self._y,) = multiply("linear", self._x, self._weights[i % len(self._weights)], sources=self.sources)

    def output(self) -> Array:
        return self._y


def make_ours(case: Case) -> Ours:
    """The package on a kind of case."""
    ours: Ours = named(case.ours)()
    return ours
