"""Valid calls of the torch operators, and what they must do. Whatever is no torch tensor has to be refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.calls_page import COPIED, QUANTISED, write
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, Options, Table, last_rows, require
from hostile.parts import FLOAT8, FLOATS, PAIRS, State, drawn, index_arrays, narrow, plain, sinks_of, tensors
from hostile.transforms import Arguments, Rng, replace
from paged_kv.torch import append_paged_kv, gather_paged_kv, linear, paged_attention

NAMES = ("k_cache", "v_cache")


def in_torch(given: Arguments) -> Arguments:
    for argument in given.values():
        if argument.view is not None:
            replace(argument, argument.view, "torch")
    return given


def all_tensors(given: Arguments, *names: str) -> None:
    require(all(given[name].kind == "torch" for name in names), "no tensor")


def caches(rng: Rng, memory: Memory, shape: tuple[int, ...], dtype: str) -> Arguments:
    """K and V: tensors of their own, views of one that holds both, or of one whose pages are laid out by heads."""
    pages, size, hk, dim = shape
    kind = int(rng.integers(3))
    if kind == 0:
        return tensors(**{name: memory.new(shape, DTYPES[dtype]) for name in NAMES})
    if kind == 1:
        both = memory.new((pages, 2, size, hk, dim), DTYPES[dtype])
        return tensors(k_cache=both[:, 0], v_cache=both[:, 1])
    both = memory.new((2, pages, hk, size, dim), DTYPES[dtype])
    return tensors(k_cache=both[0].swapaxes(1, 2), v_cache=both[1].swapaxes(1, 2))


def requests(rng: Rng, memory: Memory, given_dtype: str, dim: int) -> tuple[Arguments, np.ndarray, int]:
    """Caches that hold some requests, their table and lengths; the lengths, and Hk. What no request uses is NaN."""
    size, hk = int(rng.choice([1, 4, 16])), int(rng.choice([1, 2]))
    lengths = rng.choice([0, 1, size, size + 1, 3 * size, 2 * size + 1], int(rng.integers(0, 5)))
    used = -(-lengths // size)
    pages = int(used.sum()) + int(rng.integers(1, 4))
    ids = rng.permutation(pages)[: used.sum()]
    width = {"int8": dim + 4, "uint8": dim // 2 + 4}.get(given_dtype, dim)
    given = caches(rng, memory, (pages, size, hk, width), given_dtype)
    table = np.full(
        (len(lengths), int(used.max(initial=0)) + int(rng.integers(2))), int(rng.choice([-1, 99, 2**31 - 1]))
    )
    for b, (count, length) in enumerate(zip(used.tolist(), lengths.tolist(), strict=True)):
        table[b, :count] = ids[used[:b].sum() :][:count]
        for j in range(length):
            for name in NAMES:
                row = rng.standard_normal((hk, dim)).astype(np.float32)
                if width != dim:
                    row = model.stored(row[None], given[name].view)[0]
                given[name].view[table[b, j // size], j % size] = row
    return given | index_arrays(memory, block_tables=table, seq_lens=lengths), lengths, hk


def sides_and_table(given: Arguments) -> tuple[list[np.ndarray], Table]:
    """K and V `[page, slot, Hk, D]`, and the pages of each request: what follows those it uses may be anything."""
    all_tensors(given, *NAMES, "block_tables", "seq_lens")
    sides = [model.array(given[name], None, None, None, None) for name in NAMES]
    require(sides[0].shape == sides[1].shape and sides[0].dtype == sides[1].dtype, "k and v")
    size = sides[0].shape[1]
    table, lengths = model.indices(given["block_tables"], None, None), model.indices(given["seq_lens"])
    require(size >= 1 and len(table) == len(lengths), "B")
    require(((table < 2**31) | (table == 0xFFFFFFFF)).all() and (table >= -(2**31)).all(), "page id")
    require(((lengths >= 0) & (lengths < 2**31) & (-(-lengths // size) <= table.shape[1])).all(), "lengths")
    found = Table([row[: -(-n // size)] for row, n in zip(table, lengths.tolist(), strict=True)], lengths.tolist())
    found.check(len(sides[0]))
    return sides, found


def tokens(side: np.ndarray, table: Table) -> list[np.ndarray]:
    """Those of each request, and of codes the numbers."""
    size, side = side.shape[1], model.numbers_of(side)
    return [
        side[pages[np.arange(n) // size], np.arange(n) % size]
        for pages, n in zip(table.pages, table.lengths, strict=True)
    ]


class TorchAttention:
    """`paged_attention`."""

    name = "torch_attention"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        pairs = [*PAIRS, ("float32", "int8"), ("bfloat16", "uint8")]
        q_dtype, kv_dtype = pairs[rng.integers(len(pairs))]
        dim = 64 if "int8" in kv_dtype else int(rng.choice([64, 64, 8]))
        given, lengths, hk = requests(rng, memory, kv_dtype, dim)
        heads, counts = hk * int(rng.integers(1, 4)), np.ones_like(lengths)
        if rng.random() < 0.5:
            counts = rng.choice([0, 1, 3, 20], len(lengths))
            given |= index_arrays(memory, qo_indptr=np.concatenate([[0], np.cumsum(counts)]))
        given |= tensors(q=drawn(rng, memory, (int(counts.sum()), heads, dim), q_dtype))
        if rng.random() < 0.3:
            given |= tensors(sinks=drawn(rng, memory, (heads,), "float32"))
        found = {
            "sm_scale": [None, 0.125, 1.0][rng.integers(3)],
            "window_left": int(rng.choice([-1, 0, 3, 100])),
            "logits_soft_cap": [0.0, 30.0][rng.integers(2)],
            "alibi": bool(rng.integers(2)),
        }
        return in_torch(given) | plain(**{name: value for name, value in found.items() if rng.random() < 0.5})

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: list(paged_attention(**given)), self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        given = {
            name: one for name, one in given.items() if one.value is not None or name not in ("qo_indptr", "sinks")
        }
        require("logits_soft_cap" not in given or given["logits_soft_cap"].value is not None, "no number")
        all_tensors(given, *(name for name in ("q", "qo_indptr", "sinks") if name in given))
        (k, v), table = sides_and_table(given)
        q = model.array(given["q"], None, None, None, dtypes=[*FLOATS, *FLOAT8])
        require(
            q.shape[1] and k.shape[2] and q.shape[1] % k.shape[2] == 0 and q.shape[2] == model.elements_of(k), "heads"
        )
        require(8 <= q.shape[2] <= 512 and q.shape[2] % 8 == 0, "head_dim")
        require(
            q.dtype.name in FLOATS and (k.dtype == q.dtype or k.dtype.name in FLOAT8 or k.dtype in model.CODES),
            "dtypes",
        )
        counts = [1] * len(table.lengths)
        if "qo_indptr" in given:
            counts = model.row_counts(model.indices(given["qo_indptr"]), len(table.lengths))
        require(sum(counts) == len(q), "rows")
        options = Options.of({name: one for name, one in given.items() if name != "alibi"})
        if "alibi" in given and model.truth(given["alibi"].value):
            options.mode = "ALIBI"
        sinks, masks = sinks_of(given, q.shape[1]), last_rows(counts, table.lengths, causal=True)
        o, lse = model.attention(q, tokens(k, table), tokens(v, table), options, (None,) * 3, sinks, masks)
        narrow(o, q.dtype)
        return [o, lse]


class TorchAppend:
    """`append_paged_kv`."""

    name = "torch_append"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        dim, dtype, size, hk = int(rng.choice([8, 5, 64])), str(rng.choice(COPIED)), int(rng.choice([1, 4, 16])), 2
        counts = rng.integers(0, 4, int(rng.integers(1, 5)))  # pages of each request
        pages = int(counts.sum()) + int(rng.integers(1, 4))
        ids, table = rng.permutation(pages), np.full((len(counts), int(counts.max()) + 1), -1)
        for b, count in enumerate(counts.tolist()):
            table[b, :count] = ids[counts[:b].sum() :][:count]
        places = [(b, at) for b, count in enumerate(counts.tolist()) for at in range(count * size)]
        chosen = [places[i] for i in rng.permutation(len(places))[: rng.integers(0, 9)]]
        chosen += [(-1, int(rng.integers(-3, 99)))] * int(rng.integers(0, 2))
        held, stored = dtype, dim
        if rng.random() < 0.2:
            dim, (dtype, held, stored) = 64, QUANTISED[rng.integers(2)]
        row = (len(chosen), hk, dim)
        given = tensors(k=drawn(rng, memory, row, dtype), v=drawn(rng, memory, row, dtype))
        dtype, dim = held, stored
        given |= caches(rng, memory, (pages, size, hk, dim), dtype)
        batch, positions = np.array(chosen, int).reshape(-1, 2).T
        return in_torch(given | index_arrays(memory, block_tables=table, batch_indices=batch, positions=positions))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: append_paged_kv(**given), self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        all_tensors(given, *given)
        sides = [model.array(given[name], None, None, None, None) for name in NAMES]
        require(sides[0].shape == sides[1].shape, "k and v")
        rows = model.rows_of([given[name] for name in ("k", "v")], sides)
        size = sides[0].shape[1]
        require(size >= 1, "page_size")
        entries = model.indices(given["block_tables"], None, None)
        table = Table.dense(entries, np.full(len(entries), size), size)
        batch, positions = (model.indices(given[name]).tolist() for name in ("batch_indices", "positions"))
        require(len(batch) == len(positions) == len(rows[0]), "rows")
        model.written(*sides)
        write(sides, rows, table, batch, positions, size)
        return []


class TorchGather:
    """`gather_paged_kv`."""

    name = "torch_gather"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        dtype = str(rng.choice([*COPIED, "int8", "uint8"]))
        given, lengths, _ = requests(rng, memory, dtype, 64 if "int8" in dtype else int(rng.choice([8, 5, 64])))
        return in_torch(given) | plain(num_tokens=int(lengths.sum()))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: list(gather_paged_kv(**given)), self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        sides, table = sides_and_table(given)
        require(model.count(given["num_tokens"].value) == sum(table.lengths), "num_tokens")
        require(sum(table.lengths) < 10**6 and sides[0].dtype in DTYPES.values(), "size")
        none = [np.zeros((0, *sides[0].shape[2:-1], model.elements_of(sides[0])))]
        dtype = np.dtype(np.float32) if sides[0].dtype in model.CODES else sides[0].dtype
        return [Expected(np.concatenate(none + tokens(side, table)).astype(float), dtype) for side in sides]


class TorchLinear:
    """`linear`."""

    name = "torch_linear"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        dtype, (m, n, k) = str(rng.choice(["float32", "bfloat16"])), rng.choice([[1, 40, 96], [5, 3, 8], [3, 17, 33]])
        return in_torch(tensors(x=drawn(rng, memory, (m, k), dtype), w=drawn(rng, memory, (n, k), dtype)))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(lambda given, _: [linear(**given)], self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        all_tensors(given, "x", "w")
        w = model.array(given["w"], None, None, dtypes=FLOATS)
        x = model.array(given["x"], None, w.shape[1])
        require(x.dtype == w.dtype and max(x.size, w.size) < 10**6, "dtypes")
        a, b = x.astype(np.float64), w.astype(np.float64)
        with np.errstate(all="ignore"):
            y, reach = a @ b.T, np.abs(a) @ np.abs(b).T
        y[~(reach < (6e4 if x.dtype == np.float16 else 3e37))] = np.nan
        known = np.where(np.isnan(y), 0, y)
        spread = (1e-6 * np.where(np.isnan(y), 0, reach) + model.least(x.dtype)).max(1, initial=0) * np.sqrt(len(w))
        norms = np.maximum(np.linalg.norm(known, axis=1), 1e-38)
        return [Expected(y, x.dtype, model.TOLERANCE[x.dtype.name] + spread / norms)]
