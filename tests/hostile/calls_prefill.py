"""Valid calls of prefill, of mixed batches and of trees, and what they must do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hostile import model
from hostile.calls_decode import (
    FLOAT8,
    FLOATS,
    OPTIONS,
    PAIRS,
    SCALES,
    State,
    cache_of,
    drawn,
    dtypes_planned,
    gathered_of,
    index_arrays,
    narrow,
    options,
    outputs,
    plain,
    sides_checked,
    sinks_of,
    tensors,
    widened,
)
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, Options, Table, require
from hostile.transforms import Arguments, Rng
from paged_kv.attention import BatchAttention
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from paged_kv.trees import accepted_rows, tree_mask, tree_positions


def offsets(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def batch(rng: Rng, most: int = 5) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens and query rows of some requests, of which one may have more rows than tokens; page_size."""
    size = int(rng.choice([1, 4, 16]))
    lengths = rng.choice([0, 1, size, size + 1, 3 * size, 2 * size + 1], int(rng.integers(0, most)))
    return lengths, rng.choice([0, 1, 2, 3, 7, 20], len(lengths)), size


class SinglePrefill:
    """`single_prefill_with_kv_cache`."""

    name = "single_prefill"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        hk, dim, length = int(rng.choice([1, 2])), int(rng.choice([64, 8])), int(rng.choice([0, 1, 5, 33]))
        layout, rows = str(rng.choice(["NHD", "HND"])), int(rng.choice([0, 1, 3, 9]))
        shape = (length, hk, dim) if layout == "NHD" else (hk, length, dim)
        given = tensors(q=drawn(rng, memory, (rows, hk * int(rng.integers(1, 4)), dim), q_dtype))
        given |= tensors(k=drawn(rng, memory, shape, kv_dtype), v=drawn(rng, memory, shape, kv_dtype))
        if rng.random() < 0.3:
            given |= tensors(custom_mask=memory.put(rng.random((rows, length)) < 0.6))
        flags = plain(kv_layout=layout, causal=bool(rng.integers(2)), return_lse=bool(rng.integers(2)))
        return given | flags | options(rng)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.run, self.expected)]

    def run(self, given: dict[str, Any], _: State) -> list[Any]:
        found = single_prefill_with_kv_cache(**given)
        return list(found) if isinstance(found, tuple) else [found]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        layout = given["kv_layout"].value
        require(isinstance(layout, str) and layout in ("NHD", "HND"), "layout")
        q = model.array(given["q"], None, None, None, dtypes=[*FLOATS, *FLOAT8])
        k, v = (model.array(given[name], None, None, None) for name in ("k", "v"))
        require(k.dtype == v.dtype and k.shape[:2] == v.shape[:2], "k and v")
        result_dtype, q = q.dtype, widened(q, k.dtype)
        require(q.dtype.name in FLOATS and (k.dtype == q.dtype or k.dtype.name in FLOAT8), "dtypes")
        keys, vals = (x if layout == "NHD" else x.swapaxes(0, 1) for x in (k, v))
        require(max(len(keys), len(q)) < 10**6 and keys.shape[1] and q.shape[1], "size")
        require(q.shape[1] % keys.shape[1] == 0 and keys.shape[2] == q.shape[2], "heads")
        require(all(8 <= dim <= 512 and dim % 8 == 0 for dim in (q.shape[2], vals.shape[2])), "head_dim")
        mask = mask_of(given, [len(q)], [len(keys)])
        row_masks = model.last_rows([len(q)], [len(keys)], model.truth(given["causal"].value), mask)
        o, lse = model.attention(
            q, [keys], [vals], Options.of(given), (None, None, None), None, row_masks, vals.shape[2]
        )
        narrow(o, result_dtype)
        return [o, lse] if model.truth(given["return_lse"].value) else [o]


def mask_of(given: Arguments, counts: list[int], lengths: list[int]) -> np.ndarray | None:
    """The bits of a `custom_mask`, flattened."""
    if "custom_mask" not in given or given["custom_mask"].value is None:
        return None
    mask = model.array(given["custom_mask"], dtypes=["bool"])
    shapes = [(sum(n * length for n, length in zip(counts, lengths, strict=True)),)]
    shapes += [(counts[0], lengths[0])] if len(counts) == 1 else []
    require(mask.shape in shapes, "mask")
    return mask.reshape(-1)


ARRAYS = {
    "paged": ("qo_indptr", "indptr", "indices", "last_page_len"),
    "ragged": ("qo_indptr", "kv_indptr"),
    "mixed": ("qo_indptr", "indptr", "indices", "kv_len_arr"),
}
WRAPPERS: dict[str, Any] = {
    "paged": lambda layout: BatchPrefillWithPagedKVCacheWrapper(None, layout),
    "ragged": lambda layout: BatchPrefillWithRaggedKVCacheWrapper(None, layout),
    "mixed": BatchAttention,
}


class Prefill:
    """The wrappers over pages and over ragged K and V, and `BatchAttention`: `plan`, then `run`."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.name = f"prefill_{form}"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        lengths, counts, size = batch(rng)
        hk, dim, layout = int(rng.choice([1, 2])), int(rng.choice([64, 8])), str(rng.choice(["NHD", "HND"]))
        heads, total, rows = hk * int(rng.integers(1, 4)), int(lengths.sum()), int(counts.sum())
        used = -(-lengths // size)
        pages = int(used.sum()) + int(rng.integers(1, 4))
        ids = rng.permutation(pages)[: used.sum()]
        last = np.where(lengths > 0, (lengths - 1) % size + 1, 0)
        found = {"qo_indptr": offsets(counts), "kv_indptr": offsets(lengths), "indptr": offsets(used), "indices": ids}
        found |= {"last_page_len": last, "kv_len_arr": lengths}
        given = index_arrays(memory, **{name: found[name] for name in ARRAYS[self.form]})
        given |= plain(num_qo_heads=heads, num_kv_heads=hk, head_dim=dim, page_size=size, kv_layout=layout)
        given |= plain(q_data_type=q_dtype, kv_data_type=kv_dtype, causal=bool(rng.integers(2)))
        chosen = options(rng)
        if self.form == "mixed":
            chosen = {name: chosen[name] for name in ("logits_soft_cap", "sm_scale") if name in chosen}
        given |= chosen | tensors(q=drawn(rng, memory, (rows, heads, dim), q_dtype))
        if self.form == "ragged":
            spare = total + int(rng.integers(3))
            shape = (spare, hk, dim) if layout == "NHD" else (hk, spare, dim)
            given |= tensors(k=drawn(rng, memory, shape, kv_dtype), v=drawn(rng, memory, shape, kv_dtype))
        else:
            given |= cache_of(rng, memory, lengths, ids, pages, (size, hk, dim), kv_dtype, layout)
        if self.form != "mixed" and rng.random() < 0.3:
            given |= tensors(custom_mask=memory.put(rng.random(int((counts * lengths).sum())) < 0.6))
        if self.form == "paged" and rng.random() < 0.2:
            given |= tensors(sinks=drawn(rng, memory, (heads,), "float32"))
        if rng.random() < 0.3:
            given |= tensors(out=memory.new((rows, heads, dim), DTYPES[q_dtype]))
        if rng.random() < 0.3:
            given |= tensors(lse=memory.new((rows, heads), DTYPES["float32"]))
        if rng.random() < 0.2:
            given |= plain(k_scale=0.5, v_scale=2.0)
        return given if self.form == "mixed" else given | plain(return_lse=bool(rng.integers(2)))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.plan, self.expect_planned), (self.run, self.expect_run)]

    def plan(self, given: dict[str, Any], state: State) -> None:
        state["it"] = WRAPPERS[self.form](given["kv_layout"])
        named = ("q_data_type", "kv_data_type", "causal", "custom_mask", *OPTIONS)
        sizes = [given[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim")]
        sizes += {"paged": [given["page_size"]], "ragged": [], "mixed": [given["head_dim"], given["page_size"]]}[
            self.form
        ]
        arrays = [given[name] for name in ARRAYS[self.form]]
        state["it"].plan(*arrays, *sizes, **{name: given[name] for name in named if name in given})

    def run(self, given: dict[str, Any], state: State) -> list[Any]:
        cache = [given["cache"]] if "cache" in given else [(given["k"], given["v"])]
        cache = [given["k"], given["v"]] if self.form == "ragged" else cache
        named = {name: given[name] for name in ("out", "lse", "sinks", "return_lse", *SCALES) if name in given}
        if self.form == "mixed":
            named["logits_soft_cap"] = given.get("logits_soft_cap")
        found = state["it"].run(given["q"], *cache, **named)
        results = list(found) if isinstance(found, tuple) else [found]
        for name, result in zip(("out", "lse"), results, strict=False):
            assert given.get(name) is None or result is given[name], f"the result is not {name}"
        return results

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        require(isinstance(given["kv_layout"].value, str) and given["kv_layout"].value in ("NHD", "HND"), "layout")
        heads, hk, dim = (model.count(given[name].value, 1) for name in ("num_qo_heads", "num_kv_heads", "head_dim"))
        require(heads % hk == 0 and 8 <= dim <= 512 and dim % 8 == 0, "sizes")
        size = 1 if self.form == "ragged" else model.count(given["page_size"].value, 1)
        qo, indptr, *rest = (model.indices(given[name]) for name in ARRAYS[self.form])
        if self.form == "paged":
            table = Table.csr(indptr, *rest, size)
        elif self.form == "mixed":
            table = table_of_lengths(indptr, *rest, size)
        else:
            require(len(indptr) and indptr[0] == 0 and (np.diff(indptr) >= 0).all(), "kv_indptr")
            table = Table([], np.diff(indptr).tolist())
        counts = model.row_counts(qo, len(table.lengths))
        state |= {"sizes": (heads, hk, dim, size), "table": table, "options": Options.of(given), "indptr": indptr}
        state["dtypes"] = dtypes_planned(given)
        mask = mask_of(given, counts, table.lengths)
        state["mask"], state["counts"] = None if mask is None else mask.copy(), counts
        state["causal"] = model.truth(given["causal"].value)
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, hk, dim, size = state["sizes"]
        table, counts = state["table"], state["counts"]
        q = model.array(given["q"], sum(counts), heads, dim, dtypes=[state["dtypes"][0]])
        if self.form == "ragged":
            k, v = (model.array(given[name], None, None, None, dtypes=[state["dtypes"][1]]) for name in ("k", "v"))
            sides = [side if given["kv_layout"].value == "NHD" else side.swapaxes(0, 1) for side in (k, v)]
            indptr = state["indptr"]
            require(all(s.shape[1:] == (hk, dim) and len(s) >= indptr[-1] for s in sides), "k and v")
            gathered = [[side[a:b] for a, b in pairwise(indptr)] for side in sides]
        else:
            k, v = sides_checked(given)
            gathered = [gathered_of(side, table, (size, hk, dim), state["dtypes"][1]) for side in (k, v)]
        require(k.shape == v.shape, "k and v")
        sinks, scales = sinks_of(given, heads), tuple(given[n].value if n in given else None for n in SCALES)
        row_masks = model.last_rows(counts, table.lengths, state["causal"], state["mask"])
        o, lse = model.attention(widened(q, k.dtype), *gathered, state["options"], scales, sinks, row_masks)
        if self.form == "ragged" and q.dtype.name in FLOAT8:
            o.dtype = DTYPES["bfloat16"]
        else:
            narrow(o, q.dtype)
        outputs(given, state, o, lse, q, k, v, *([] if sinks is None else [given["sinks"].view]))
        return [o, lse] if self.form == "mixed" or model.truth(given["return_lse"].value) else [o]


def table_of_lengths(indptr: np.ndarray, ids: np.ndarray, lengths: np.ndarray, size: int) -> Table:
    """Requests whose lengths are given in tokens."""
    require(len(indptr) == len(lengths) + 1 and indptr[0] == 0 and (np.diff(indptr) >= 0).all(), "indptr")
    require(indptr[-1] <= len(ids) and (lengths >= 0).all() and (lengths < 2**31).all(), "indices")
    used = -(-lengths // size)
    require((used <= np.diff(indptr)).all(), "pages")
    return Table([ids[a : a + n] for a, n in zip(indptr, used, strict=False)], lengths.tolist())


class Trees:
    """`tree_mask`, `tree_positions` and `accepted_rows`."""

    name = "trees"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        counts = rng.integers(0, 6, int(rng.integers(0, 4)))
        parents = [int(rng.integers(-1, i)) for n in counts for i in range(n)]
        given = index_arrays(
            memory, parents=parents, qo_indptr=offsets(counts), cache_lengths=rng.integers(0, 9, len(counts))
        )
        given["parents"].is_index = False  # -1 is one of them
        tree = [-1, *(int(rng.integers(0, i)) for i in range(1, 6))]
        given |= plain(window_left=int(rng.choice([-1, 0, 2, 100])), tree=tree)
        return given | plain(tokens=rng.integers(0, 3, 6).tolist(), sampled=rng.integers(0, 3, 6).tolist())

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.mask, self.masked), (self.positions, self.placed), (self.accept, self.accepted)]

    def mask(self, given: dict[str, Any], _: State) -> list[Any]:
        return [
            tree_mask(*(given[n] for n in ("parents", "qo_indptr", "cache_lengths")), window_left=given["window_left"])
        ]

    def positions(self, given: dict[str, Any], _: State) -> list[Any]:
        return [tree_positions(*(given[n] for n in ("parents", "qo_indptr", "cache_lengths")))]

    def accept(self, given: dict[str, Any], _: State) -> list[Any]:
        return [np.array(accepted_rows(given["tree"], given["tokens"], given["sampled"]))]

    def trees(self, given: Arguments) -> list[tuple[int, list[list[int]]]]:
        """Cached tokens of each request, and for each row the rows from the root to it."""
        parents, qo, cached = (model.indices(given[name]) for name in ("parents", "qo_indptr", "cache_lengths"))
        counts = model.row_counts(qo, len(cached))
        require(qo[-1] == len(parents) and (cached >= 0).all(), "rows")
        found, begin = [], 0
        for count, length in zip(counts, cached.tolist(), strict=True):
            paths: list[list[int]] = []
            for i, parent in enumerate(parents[begin : begin + count].tolist()):
                require(-1 <= parent < i, "parent")
                paths.append([*(paths[parent] if parent >= 0 else []), i])
            found.append((length, paths))
            begin += count
        return found

    def masked(self, given: Arguments, _: State) -> list[Expected]:
        window, bits = model.count(given["window_left"].value, -1), [np.zeros(0, bool)]
        for length, paths in self.trees(given):
            require(len(paths) * (length + len(paths)) < 2**31, "size")
            for path in paths:
                first = 0 if window < 0 else max(0, length + len(path) - window - 1)
                row = np.zeros(length + len(paths), bool)
                row[first:length] = True
                row[[length + i for i in path[max(0, first - length) :]]] = True
                bits.append(row)
        return [Expected(np.concatenate(bits), np.dtype(bool))]

    def placed(self, given: Arguments, _: State) -> list[Expected]:
        found = [length + len(path) - 1 for length, paths in self.trees(given) for path in paths]
        return [Expected(np.array(found, np.int64), np.dtype(np.int32))]

    def accepted(self, given: Arguments, _: State) -> list[Expected]:
        lists = []
        for name in ("tree", "tokens", "sampled"):
            value = given[name].value
            require(isinstance(value, list | tuple | np.ndarray | memoryview), "no sequence")
            lists.append([model.count(entry, -(2**62)) for entry in value])
        tree, tokens, sampled = lists
        require(len(tree) == len(tokens) == len(sampled) > 0 and tree[0] == -1, "lengths")
        require(all(0 <= parent < i for i, parent in enumerate(tree) if i), "parents")
        rows = [0]
        for i in range(1, len(tree)):
            if tree[i] == rows[-1] and tokens[i] == sampled[tree[i]]:
                rows.append(i)
        return [Expected(np.array(rows), np.dtype(np.int64))]
