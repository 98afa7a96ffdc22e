"""Merging states and the functional cache: valid calls, and what they must do."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, require
from hostile.parts import State, drawn, index_arrays, plain, tensors
from hostile.transforms import Arguments, Rng
from paged_kv.cache import PagedKVCache, allocate_blocks, append_kv, gather_kv
from paged_kv.cascade import merge_state, merge_state_in_place, merge_states

FLOATS = ["float32", "float16", "bfloat16"]


class Merge:
    """`merge_state`, `merge_states` and `merge_state_in_place`."""

    def __init__(self, mode: str) -> None:
        self.name = {"two": "merge_state", "many": "merge_states", "in_place": "merge_state_in_place"}[mode]
        self.mode = mode

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        dtype, dim = str(rng.choice(FLOATS)), int(rng.choice([1, 8, 64]))
        rows, heads, states = int(rng.integers(0, 4)), int(rng.integers(1, 4)), int(rng.integers(0, 4))
        shape = (rows, states, heads) if self.mode == "many" else (rows, heads)
        names = {"two": "v_a s_a v_b s_b", "many": "v s", "in_place": "v s v_other s_other"}[self.mode].split()
        given: Arguments = {}
        for v, s in zip(names[::2], names[1::2], strict=True):
            given |= tensors(**{v: drawn(rng, memory, (*shape, dim), dtype), s: drawn(rng, memory, shape, "float32")})
            empty = rng.random(shape) < 0.2  # a state that has seen no key; what its output holds does not matter
            given[s].view[empty] = -np.inf
            given[v].view[empty] = np.nan
        if self.mode == "in_place" and rng.random() < 0.5:
            given |= tensors(mask=memory.put(rng.random(rows) < 0.5))
        return given

    def steps(self) -> list[tuple[Any, Any]]:
        function = {"two": merge_state, "many": merge_states, "in_place": merge_state_in_place}[self.mode]
        return [(lambda given, _: list(function(**given) or []), self.expected)]

    def expected(self, given: Arguments, state: State) -> list[Expected]:
        names = [name for name in given if name != "mask"]
        rank = 4 if self.mode == "many" else 3
        vs = [model.array(given[name], *[None] * rank, dtypes=FLOATS) for name in names[::2]]
        ss = [model.array(given[name], *[None] * (rank - 1), dtypes=["float32"]) for name in names[1::2]]
        require(all(s.shape == v.shape[:-1] and v.size < 10**6 for v, s in zip(vs, ss, strict=True)), "s")
        require(len({v.dtype for v in vs}) == len({v.shape for v in vs}) == 1, "v")
        if self.mode == "many":
            return list(model.merge(vs[0], ss[0]))
        o, lse = model.merge(np.stack(vs, 1), np.stack(ss, 1))
        if self.mode == "two":
            return [o, lse]
        mask = given.get("mask")
        rows = np.ones(len(vs[0]), bool)
        if mask is not None and mask.value is not None:
            rows = model.array(mask, len(vs[0]), dtypes=["bool"])
        others = (vs[1], ss[1]) + (() if mask is None or mask.value is None else (rows,))
        require(all(given[name].kind != "jax" for name in names[:2]), "JAX arrays are constant")
        model.written(vs[0], ss[0], others=others)
        for wanted, view in ((o, vs[0]), (lse, ss[0])):
            at = rows.reshape(-1, *[1] * (view.ndim - 1))
            wanted.values = np.where(at, wanted.values, view.astype(np.float64))
            state.setdefault("written", []).append((view, wanted))
        return []


class Functional:
    """The functional cache: `allocate_blocks`, `append_kv`, `gather_kv`."""

    name = "functional"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        dtype, size, dim = str(rng.choice(["float32", "bfloat16", "float8_e4m3fn"])), int(rng.choice([1, 4])), 8
        lengths = rng.integers(0, 3 * size, 3)
        used = -(-lengths // size)
        blocks, columns = int(used.sum()) + 6, 8
        ids = rng.permutation(blocks)
        table = np.full((3, columns), -1)
        for b, count in enumerate(used):
            table[b, :count] = ids[used[:b].sum() :][:count]
        free = ids[used.sum() :]
        pool = [memory.new((blocks, size, 2, dim), DTYPES[dtype]) for _ in range(2)]
        for view in pool:
            view[...] = rng.standard_normal(view.shape).astype(np.float32)
        new = int(rng.integers(0, 4))
        given = tensors(key_pool=pool[0], value_pool=pool[1])
        given |= index_arrays(memory, block_table=table, seq_lengths=lengths, free_block_ids=free)
        given |= tensors(**{name: drawn(rng, memory, (new, 2, dim), dtype) for name in ("keys_new", "values_new")})
        return given | plain(sequence_idx=int(rng.integers(3)), num_new_tokens=new)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.allocate, self.allocated), (self.append, self.appended), (self.gather, self.gathered)]

    def allocate(self, given: dict[str, Any], state: State) -> list[Any]:
        cache = PagedKVCache(given["key_pool"], given["value_pool"], given["block_table"], given["seq_lengths"])
        named = {name: given[name] for name in ("sequence_idx", "num_new_tokens", "free_block_ids")}
        state["cache"], consumed = allocate_blocks(cache, **named)
        return [state["cache"].block_table, np.array([consumed])]

    def append(self, given: dict[str, Any], state: State) -> list[Any]:
        state["cache"] = append_kv(state["cache"], given["sequence_idx"], given["keys_new"], given["values_new"])
        return [state["cache"].seq_lengths]

    def gather(self, given: dict[str, Any], state: State) -> list[Any]:
        keys, vals, length = gather_kv(state["cache"], given["sequence_idx"])
        return [keys, vals, np.array([length])]

    def allocated(self, given: Arguments, state: State) -> list[Expected]:
        table, lengths = model.indices(given["block_table"], None, None), model.indices(given["seq_lengths"])
        require(len(table) == len(lengths), "B")
        b, added = model.count(given["sequence_idx"].value), model.count(given["num_new_tokens"].value)
        require(b < len(table) and lengths[b] >= 0, "sequence")
        free = model.indices(given["free_block_ids"])
        shape = getattr(given["key_pool"].view, "shape", ())
        require(len(shape) >= 2 and shape[1] >= 1, "pool")
        first, last = -(-lengths[b] // shape[1]), -(-(lengths[b] + added) // shape[1])
        require(last - first <= len(free) and last <= table.shape[1], "room")
        taken = free[: last - first].tolist()
        require(len(set(taken)) == len(taken) and all(0 <= block < shape[0] for block in taken), "free_block_ids")
        grown = table.copy()
        grown[b, first:last] = taken
        require(all((grown == block).sum() == 1 for block in taken), "owned")
        state |= {"table": grown, "lengths": lengths.copy(), "b": b, "size": shape[1]}
        return [Expected(grown, given["block_table"].view.dtype), Expected(np.array([len(taken)]), np.dtype(np.int64))]

    def appended(self, given: Arguments, state: State) -> list[Expected]:
        pools = [model.array(given[name], None, None, None, None) for name in ("key_pool", "value_pool")]
        rows = [model.array(given[name], None, *pools[0].shape[2:]) for name in ("keys_new", "values_new")]
        require(pools[0].shape == pools[1].shape and pools[0].dtype == pools[1].dtype in DTYPES.values(), "pools")
        require(pools[0].size < 10**7 and rows[0].shape == rows[1].shape, "rows")
        floats = [name for name in DTYPES if "float" in name]
        for row in rows:
            require(row.dtype == pools[0].dtype or {row.dtype.name, pools[0].dtype.name} <= set(floats), "dtype")
        b, size, start = state["b"], state["size"], int(state["lengths"][state["b"]])
        count = len(rows[0])
        state["pools"] = [np.array(pool) for pool in pools]
        row = state["table"][b]
        require(-(-(start + count) // size) <= len(row), "room")
        logical = range(start // size, -(-(start + count) // size))
        for at in logical if count else ():
            require(0 <= row[at] < len(pools[0]), "block")
            require((state["table"] == row[at]).sum() == 1, "a block of another sequence")
        with np.errstate(all="ignore"):
            for pool, new in zip(state["pools"], rows, strict=True):
                for i in range(count):
                    pool[row[(start + i) // size], (start + i) % size] = new[i]
        state["lengths"][b] += count
        return [Expected(state["lengths"], given["seq_lengths"].view.dtype)]

    def gathered(self, _: Arguments, state: State) -> list[Expected]:
        b, size = state["b"], state["size"]
        length, row = int(state["lengths"][b]), state["table"][b]
        require(-(-length // size) <= len(row), "room")
        j = np.arange(length)
        blocks = row[j // size]
        require(((blocks >= 0) & (blocks < len(state["pools"][0]))).all(), "block")
        found = [Expected(pool[blocks, j % size].astype(np.float64), pool.dtype) for pool in state["pools"]]
        return [*found, Expected(np.array([length]), np.dtype(np.int64))]
