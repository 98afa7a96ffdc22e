"""Valid appends and page-table arithmetic, and what they must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, Table, require
from hostile.parts import State, drawn, index_arrays, layout_of, plain, tensors
from hostile.transforms import Arguments, Rng
from paged_kv.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)

COPIED = ["float32", "bfloat16", "float8_e4m3fn", "float64", "int32", "float16"]
QUANTISED = [("float32", "int8", 68), ("bfloat16", "uint8", 36)]
"""Rows, the cache of codes that they become, and the bytes of a head of 64 elements there."""


def requests(rng: Rng, dense: bool = False) -> tuple[Any, ...]:
    """Tokens of some requests after an append and the new ones of each, pages of each, page_size, pages in the pool."""
    size = int(rng.choice([1, 4, 16]))
    after = rng.choice([1, size, size + 1, 3 * size, 2 * size + 1], int(rng.integers(1 if dense else 0, 5)))
    new = np.minimum(rng.integers(0, 4, len(after)), after)
    used = -(-after // size)
    pages = int(used.sum()) + int(rng.integers(1, 4))
    ids = rng.permutation(pages)[: used.sum()]
    return after, new, used, ids, size, pages


def csr(memory: Memory, after: Any, used: Any, ids: Any, size: int) -> Arguments:
    offsets, last = np.concatenate([[0], np.cumsum(used)]), (after - 1) % size + 1
    return index_arrays(memory, kv_indices=ids, kv_indptr=offsets, kv_last_page_len=last)


def rows_of(after: Any, new: Any) -> tuple[list[int], list[int]]:
    """Request and position of every new token."""
    batch = [b for b, n in enumerate(new) for _ in range(n)]
    return batch, [int(p) for a, n in zip(after, new, strict=True) for p in range(a - n, a)]


def table_of(given: Arguments, size: int) -> Table:
    ids, indptr, last = (model.indices(given[name]) for name in ("kv_indices", "kv_indptr", "kv_last_page_len"))
    return Table.csr(indptr, ids, last, size)


def write(
    sides: list[np.ndarray], rows: list[np.ndarray], table: Table, batch: list[int], positions: list[int], size: int
) -> None:
    """Writes each row to its slot; refuses rows of no slot, and two for one."""
    table.check(len(sides[0]))
    slots = []
    for b, position in zip(batch, positions, strict=True):
        if b == -1:
            slots.append(None)
            continue
        require(0 <= b < len(table.pages) and 0 <= position < len(table.pages[b]) * size, "position")
        slots.append((int(table.pages[b][position // size]), position % size))
    kept = [slot for slot in slots if slot]
    require(len(set(kept)) == len(kept), "two rows for one slot")
    rows = [np.array(side) for side in rows]  # they may lie where it is written
    for side, new in zip(sides, rows, strict=True):
        for slot, row in zip(slots, new, strict=True):
            if slot:
                side[slot] = row


class Append:
    """`append_paged_kv_cache` in one of its three modes."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = f"append_{mode}"
        self.cache_name = {"at": "paged_kv_cache", "last": "kv_data", "dense": "kv_cache"}[mode]
        self.rows = ("k", "v") if mode == "dense" else ("append_key", "append_value")

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        after, new, used, ids, size, pages = requests(rng, self.mode == "dense")
        dtype, layout = str(rng.choice(COPIED)), str(rng.choice(["NHD", "HND"]))
        hk, dim = int(rng.choice([1, 3])), int(rng.choice([8, 5, 64]))
        if self.mode == "dense":
            new = np.ones_like(after)
        held, stored = dtype, dim
        if rng.random() < 0.2:
            dim, (dtype, held, stored) = 64, QUANTISED[rng.integers(2)]
        row = (int(new.sum()), hk, dim)
        given = tensors(**{name: drawn(rng, memory, row, dtype) for name in self.rows})
        dtype, dim = held, stored
        page = (size, hk, dim) if layout == "NHD" else (hk, size, dim)
        if rng.random() < 0.5:
            given |= tensors(cache=memory.new((pages, 2, *page), DTYPES[dtype]))
        else:
            given |= tensors(
                cache_k=memory.new((pages, *page), DTYPES[dtype]), cache_v=memory.new((pages, *page), DTYPES[dtype])
            )
        if self.mode == "at":
            batch, positions = rows_of(after, new)
            order = rng.permutation(len(batch))
            given |= index_arrays(memory, batch_indices=np.array(batch)[order], positions=np.array(positions)[order])
        if self.mode == "last":
            given |= index_arrays(memory, append_indptr=np.concatenate([[0], np.cumsum(new)]))
        if self.mode == "dense":
            given |= dense(memory, after, used, ids, size)
        else:
            given |= csr(memory, after, used, ids, size)
        return given | plain(kv_layout=layout)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.call, self.expected)]

    def call(self, given: dict[str, Any], _: State) -> list[Any]:
        names = [name for name in given if not name.startswith("cache")]
        cache = given["cache"] if "cache" in given else (given["cache_k"], given["cache_v"])
        found = append_paged_kv_cache(**{name: given[name] for name in names}, **{self.cache_name: cache})
        assert found is None
        return []

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        layout = layout_of(given)
        if "cache" in given:
            both = model.array(given["cache"], None, 2, None, None, None)
            sides, whole = [both[:, 0], both[:, 1]], [both]
        else:
            sides = [model.array(given[name], None, None, None, None) for name in ("cache_k", "cache_v")]
            whole = sides
            require(sides[0].shape == sides[1].shape, "k and v")
        require(all(given[n].kind != "jax" for n in given if n.startswith("cache")), "JAX arrays are constant")
        sides = sides if layout == "NHD" else [side.swapaxes(1, 2) for side in sides]
        rows = model.rows_of([given[name] for name in self.rows], sides)
        size = sides[0].shape[1]
        require(size >= 1, "page_size")
        table, batch, positions = destination(given, size, len(rows[0]), self.mode)
        table.check(len(sides[0]))
        model.written(*whole)
        write(sides, rows, table, batch, positions, size)
        return []


def destination(
    given: Arguments, size: int, num_rows: int, mode: str
) -> tuple[Table, list[int], Sequence[int] | np.ndarray]:
    """The page table of an append, and the request and position of each row."""
    batch: list[int]
    positions: Sequence[int] | np.ndarray
    if mode == "dense":
        require(model.count(given["page_size"].value, 1) == size, "page_size")
        table = Table.dense(model.indices(given["page_table"], None, None), model.indices(given["last_page_len"]), size)
        batch, positions = list(range(len(table.pages))), table.lengths
        require(num_rows == len(batch), "rows")
        return table, batch, positions
    table = table_of(given, size)
    if mode == "at":
        batch, positions = (model.indices(given[name]).tolist() for name in ("batch_indices", "positions"))
    else:
        offsets = model.indices(given["append_indptr"])
        require(len(offsets) == len(table.lengths) + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all(), "offsets")
        require((np.diff(offsets) <= table.lengths).all() and offsets[-1] == num_rows, "offsets")
        batch, positions = rows_of(table.lengths, np.diff(offsets))
    require(len(batch) == len(positions) == num_rows, "rows")
    return table, batch, positions


def dense(memory: Memory, after: Any, used: Any, ids: Any, size: int) -> Arguments:
    """A dense table of requests whose last token is yet to be appended."""
    table = np.full((len(after), int(used.max(initial=0)) + 1), -1)
    for b, count in enumerate(used):
        table[b, :count] = ids[used[:b].sum() :][:count]
    return index_arrays(memory, page_table=table, last_page_len=(after - 1) % size) | plain(page_size=size)


class AppendLatent:
    """`append_paged_mla_kv_cache` with two caches, or with one for both."""

    def __init__(self, mode: str) -> None:
        self.mode, self.name = mode, f"append_mla_{mode}"
        self.rows = ("k", "v") if mode == "dense" else ("append_ckv", "append_kpe")

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        after, new, used, ids, size, pages = requests(rng, self.mode == "dense")
        dtype, (wide, narrow) = str(rng.choice(COPIED)), rng.choice([[64, 8], [5, 3], [16, 16]])
        new = np.ones_like(after) if self.mode == "dense" else new
        count, heads = int(new.sum()), [int(rng.integers(1, 3))] * int(self.mode == "dense" and rng.random() < 0.5)
        given = tensors(
            **{
                name: drawn(rng, memory, (count, *heads, int(width)), dtype)
                for name, width in zip(self.rows, (wide, narrow), strict=True)
            }
        )
        if self.mode == "dense":
            given |= tensors(mla_kv_cache=memory.new((pages, size, *heads, int(wide + narrow)), DTYPES[dtype]))
            return given | dense(memory, after, used, ids, size)
        batch, positions = rows_of(after, new)
        given |= tensors(
            ckv_cache=memory.new((pages, size, int(wide)), DTYPES[dtype]),
            kpe_cache=memory.new((pages, size, int(narrow)), DTYPES[dtype]),
        )
        return (
            given | index_arrays(memory, batch_indices=batch, positions=positions) | csr(memory, after, used, ids, size)
        )

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: append_paged_mla_kv_cache(**given) or [], self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        if self.mode == "dense":
            cache = model.array(given["mla_kv_cache"])
            require(cache.ndim in (3, 4), "rank")
            rows = [model.array(given[name], *[None] * (cache.ndim - 1)) for name in self.rows]
            require(rows[0].shape[:-1] == rows[1].shape[:-1] and rows[0].shape[1:-1] == cache.shape[2:-1], "rows")
            require(rows[0].shape[-1] + rows[1].shape[-1] == cache.shape[-1], "width")
            whole, names = [cache], ["mla_kv_cache"]
            sides = [cache[..., : rows[0].shape[-1]], cache[..., rows[0].shape[-1] :]]
        else:
            names = ["ckv_cache", "kpe_cache"]
            whole = sides = [model.array(given[name], None, None, None) for name in names]
            rows = [model.array(given[n], None, side.shape[2]) for n, side in zip(self.rows, sides, strict=True)]
            require(sides[0].shape[:2] == sides[1].shape[:2], "pages")
        require(all(given[name].kind != "jax" for name in names), "JAX arrays are constant")
        require(len(rows[0]) == len(rows[1]) and len(rows[0]) < 10**6, "rows")
        require(len({x.dtype for x in (*sides, *rows)}) == 1 and sides[0].dtype in DTYPES.values(), "dtypes")
        size = sides[0].shape[1]
        table, batch, positions = destination(given, size, len(rows[0]), self.mode)
        table.check(len(sides[0]))
        model.written(*whole)
        write(sides, rows, table, batch, positions, size)
        return []


class Positions:
    """`get_batch_indices_positions` in its two modes."""

    name = "positions"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        after, new, used, ids, size, _ = requests(rng)
        if rng.random() < 0.5:
            return dense(memory, after, used, ids, size)
        offsets = np.concatenate([[0], np.cumsum(new)])
        given = index_arrays(memory, append_indptr=offsets, seq_lens=after)
        return given | plain(nnz=int(new.sum() + rng.integers(0, 3)))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: list(get_batch_indices_positions(**given)), self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        first = "append_indptr" if "append_indptr" in given else "page_table"
        if first == "page_table":
            size = model.count(given["page_size"].value, 1)
            table = Table.dense(
                model.indices(given["page_table"], None, None), model.indices(given["last_page_len"]), size
            )
            require(sum(table.lengths) <= 2**25, "nnz")
            batch, positions = rows_of(table.lengths, table.lengths)
        else:
            offsets, lengths = model.indices(given["append_indptr"]), model.indices(given["seq_lens"])
            nnz = model.count(given["nnz"].value)
            require(nnz <= 2**25, "nnz")
            require(len(offsets) == len(lengths) + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all(), "offsets")
            require((np.diff(offsets) <= lengths).all() and offsets[-1] <= nnz and (lengths < 2**31).all(), "lengths")
            batch, positions = rows_of(lengths, np.diff(offsets))
            padding = nnz - len(batch)
            batch, positions = batch + [-1] * padding, positions + [0] * padding
        wide = np.dtype(np.int64 if given[first].view.dtype == np.int64 else np.int32)
        return [Expected(np.array(found, np.int64), wide) for found in (batch, positions)]


class SeqLens:
    """`get_seq_lens` in its two modes."""

    name = "seq_lens"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        after, _, used, ids, size, _ = requests(rng)
        if rng.random() < 0.5:
            return dense(memory, after, used, ids, size)
        given = csr(memory, after, used, ids, size)
        del given["kv_indices"]
        return given | plain(page_size=size)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: [get_seq_lens(**given)], self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        size = model.count(given["page_size"].value, 1)
        first = "kv_indptr" if "kv_indptr" in given else "page_table"
        if first == "page_table":
            table = Table.dense(model.indices(given[first], None, None), model.indices(given["last_page_len"]), size)
        else:
            table = Table.csr(model.indices(given[first]), None, model.indices(given["kv_last_page_len"]), size)
        wide = np.dtype(np.int64 if given[first].view.dtype == np.int64 else np.int32)
        return [Expected(np.array(table.lengths, np.int64), wide)]
