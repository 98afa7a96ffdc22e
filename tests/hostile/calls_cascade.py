"""Valid cascades and shared prefixes, and what they must do. Float32 alone: other outputs are variants of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import Memory
from hostile.model import Expected, Options, RowMask, Table, require
from hostile.parts import (
    FLOAT8,
    FLOATS,
    OPTIONS,
    Pages,
    State,
    as_list,
    batch,
    cache_given,
    cache_of,
    drawn,
    dtype_named,
    dtypes_planned,
    gathered_of,
    heads_of,
    index_arrays,
    layout_of,
    narrow,
    offsets,
    options,
    plain,
    sides_checked,
    tensors,
    widened,
)
from hostile.transforms import Arguments, Rng
from paged_kv.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)

SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
PARTS = ("qo", "indptr", "indices", "last")
NONE = (None, None, None)


def sizes_of(given: Arguments) -> tuple[int, int, int, int]:
    return (*heads_of(given), model.count(given["page_size"].value, 1))


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """One context of a row's tokens."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def placed(context: int, behind: int, causal: bool, row: int) -> RowMask:
    """A row with so many others behind it, in one context of its own."""
    position = context - 1 - behind
    return RowMask(row, position, np.arange(context) <= position if causal else None)


class Levels:
    """`MultiLevelCascadeAttentionWrapper`."""

    name = "levels"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        number, size = int(rng.integers(1, 4)), int(rng.choice([1, 4, 16]))
        hk, dim, layout = int(rng.choice([1, 2])), int(rng.choice([64, 8])), str(rng.choice(["NHD", "HND"]))
        heads = hk * int(rng.integers(1, 4))
        rows = [offsets(rng.choice([0, 1, 1, 2, 5, 17], int(rng.integers(0, 4))))]
        for _ in range(number - 1):
            inner = rows[0][1:-1]
            rows.insert(0, np.concatenate([[0], inner[rng.random(len(inner)) < 0.5], rows[0][-1:]]))
        lengths = [rng.choice([0, 0, 1, size, size + 1, 2 * size + 1], len(level) - 1) for level in rows]
        used = [-(-level // size) for level in lengths]
        total = int(sum(level.sum() for level in used))
        ids, given, begin = rng.permutation(total + int(rng.integers(1, 4))), {}, 0
        for level in range(number):
            own = ids[begin : begin + used[level].sum()]
            begin += len(own)
            last = np.where(lengths[level] > 0, (lengths[level] - 1) % size + 1, 0)
            arrays = dict(zip(PARTS, (rows[level], offsets(used[level]), own, last), strict=True))
            given |= index_arrays(memory, **{f"{name}_{level}": array for name, array in arrays.items()})
        given |= plain(num_levels=number, num_qo_heads=heads, num_kv_heads=hk, head_dim=dim, page_size=size)
        given |= plain(kv_layout=layout, q_data_type="float32", kv_data_type=None, causal=bool(rng.integers(2)))
        given |= options(rng) | tensors(q=drawn(rng, memory, (int(rows[0][-1]), heads, dim), "float32"))
        flat = np.concatenate(lengths)
        given |= cache_of(rng, memory, flat, ids[:total], len(ids), (size, hk, dim), "float32", layout)
        return given | plain(return_lse=bool(rng.integers(2)))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.plan, self.expect_planned), (self.run, self.expect_run)]

    def lists(self, given: dict[str, Any]) -> list[list[Any]]:
        """For each of PARTS the arrays of all levels."""
        number = sum(name.startswith("qo_") for name in given)
        return [[given[f"{part}_{level}"] for level in range(number)] for part in PARTS]

    def plan(self, given: dict[str, Any], state: State) -> None:
        state["it"] = MultiLevelCascadeAttentionWrapper(given["num_levels"], None, given["kv_layout"])
        named = ("q_data_type", "kv_data_type", "causal", *OPTIONS)
        sizes = [given[name] for name in SIZES]
        state["it"].plan(*self.lists(given), *sizes, **{name: given[name] for name in named if name in given})

    def run(self, given: dict[str, Any], state: State) -> list[Any]:
        return as_list(state["it"].run(given["q"], cache_given(given), return_lse=given["return_lse"]))

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        layout_of(given)
        sizes, levels = sizes_of(given), []
        arrays = list(zip(*self.lists(given), strict=True))
        require(model.count(given["num_levels"].value) == len(arrays), "num_levels")
        for qo, indptr, ids, last in arrays:
            table = Table.csr(*(model.indices(array) for array in (indptr, ids, last)), sizes[3])
            rows = model.indices(qo)
            model.row_counts(rows, len(table.lengths))
            if levels:
                require(rows[-1] == levels[-1][0][-1] and np.isin(levels[-1][0], rows).all(), "levels nest")
            levels.append((rows, table))
        require(sum(max(table.lengths, default=0) for _, table in levels) < 2**31, "length")
        state |= {"sizes": sizes, "levels": levels, "options": Options.of(given), "dtypes": dtypes_planned(given)}
        state["causal"] = model.truth(given["causal"].value)
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, hk, dim, size = state["sizes"]
        levels, row_masks, contexts = state["levels"], [], [[], []]
        q = model.array(given["q"], levels[0][0][-1], heads, dim, dtypes=[state["dtypes"][0]])
        sides = sides_checked(given)
        require(sides[0].shape == sides[1].shape, "k and v")
        gathered = [
            [gathered_of(side, table, (size, hk, dim), state["dtypes"][1]) for _, table in levels] for side in sides
        ]
        for t in range(len(q)):
            groups = [int(np.searchsorted(rows, t, side="right")) - 1 for rows, _ in levels]
            for context, of_levels in zip(contexts, gathered, strict=True):
                context.append(joined([level[group] for level, group in zip(of_levels, groups, strict=True)]))
            behind = int(levels[-1][0][groups[-1] + 1]) - t - 1
            row_masks.append(placed(len(contexts[0][-1]), behind, state["causal"], t))
        q_op = widened(q, sides[0].dtype)
        o, lse = model.attention(q_op, *contexts, state["options"], NONE, None, row_masks)
        narrow(o, q.dtype)
        return [o, lse] if model.truth(given["return_lse"].value) else [o]


class SharedPrefix:
    """The two wrappers of one contiguous prefix."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = f"shared_prefix_{mode}"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        lengths, counts, size = batch(rng)
        hk, dim, layout = int(rng.choice([1, 2])), int(rng.choice([64, 8])), str(rng.choice(["NHD", "HND"]))
        counts = np.ones_like(counts) if self.mode == "decode" else counts
        heads, prefix = hk * int(rng.integers(1, 4)), int(rng.choice([0, 1, 5, 33]))
        pages = Pages(rng, lengths, size)
        given = {} if self.mode == "decode" else index_arrays(memory, qo=offsets(counts))
        given |= index_arrays(memory, indptr=pages.indptr, indices=pages.ids, last=pages.last)
        given |= plain(num_qo_heads=heads, num_kv_heads=hk, head_dim=dim, page_size=size, kv_layout=layout)
        given |= tensors(q=drawn(rng, memory, (int(counts.sum()), heads, dim), "float32"))
        shape = (prefix, hk, dim) if layout == "NHD" else (hk, prefix, dim)
        given |= tensors(**{name: drawn(rng, memory, shape, "float32") for name in ("k_shared", "v_shared")})
        given |= cache_of(rng, memory, lengths, pages.ids, pages.pool, (size, hk, dim), "float32", layout)
        if self.mode == "decode":
            return given | plain(data_type="float32")
        return given | plain(causal=bool(rng.integers(2)), sm_scale=[None, 0.3][rng.integers(2)])

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.plan, self.expect_planned), (self.run, self.expect_run)]

    def plan(self, given: dict[str, Any], state: State) -> None:
        decodes = self.mode == "decode"
        kind = (
            BatchDecodeWithSharedPrefixPagedKVCacheWrapper
            if decodes
            else BatchPrefillWithSharedPrefixPagedKVCacheWrapper
        )
        state["it"] = kind(None, given["kv_layout"])
        named = {"data_type": given["data_type"]} if decodes else {}
        arrays = [given[name] for name in PARTS if name in given]
        state["it"].begin_forward(*arrays, *(given[name] for name in SIZES), **named)

    def run(self, given: dict[str, Any], state: State) -> list[Any]:
        named = {name: given[name] for name in ("causal", "sm_scale") if name in given}
        return [state["it"].forward(given["q"], given["k_shared"], given["v_shared"], cache_given(given), **named)]

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        layout_of(given)
        sizes = sizes_of(given)
        table = Table.csr(*(model.indices(given[name]) for name in PARTS[1:]), sizes[3])
        counts = [1] * len(table.lengths)
        if self.mode == "prefill":
            counts = model.row_counts(model.indices(given["qo"]), len(table.lengths))
        else:
            dtype = dtype_named(given["data_type"].value)
            require(dtype in (*FLOATS, *FLOAT8), "dtype")
            state["dtypes"] = ["float16" if dtype in FLOAT8 else dtype, dtype]
        state |= {"sizes": sizes, "table": table, "counts": counts}
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, hk, dim, size = state["sizes"]
        table, counts, layout = state["table"], state["counts"], given["kv_layout"].value
        q = model.array(given["q"], sum(counts), heads, dim, dtypes=[*FLOATS, *FLOAT8])
        sides = sides_checked(given)
        shared = [model.array(given[name], None, None, None) for name in ("k_shared", "v_shared")]
        shared = [side if layout == "NHD" else side.swapaxes(0, 1) for side in shared]
        require(sides[0].shape == sides[1].shape and shared[0].shape == shared[1].shape, "k and v")
        dtypes = state.get("dtypes", [q.dtype.name, shared[0].dtype.name])
        require(q.dtype.name == dtypes[0] and dtypes[1] in (*FLOATS, *FLOAT8), "dtypes")
        require(dtypes[1] == dtypes[0] or not set(dtypes) <= set(FLOATS), "dtypes")
        require(all(s.dtype.name == dtypes[1] and s.shape[1:] == (hk, dim) for s in shared), "prefix")
        require(len(shared[0]) < 10**6, "size")
        gathered = [gathered_of(side, table, (size, hk, dim), dtypes[1]) for side in sides]
        causal = self.mode == "decode" or model.truth(given["causal"].value)
        row_masks, contexts = [], [[], []]
        for b, count in enumerate(counts):
            for i in range(count):
                for context, prefix, own in zip(contexts, shared, gathered, strict=True):
                    context.append(joined([prefix, own[b]]))
                row_masks.append(placed(len(contexts[0][-1]), count - 1 - i, causal, len(row_masks)))
        scale = {"sm_scale": given["sm_scale"]} if "sm_scale" in given else {}
        o, _ = model.attention(widened(q, shared[0].dtype), *contexts, Options.of(scale), NONE, None, row_masks)
        narrow(o, q.dtype)
        return [o]
