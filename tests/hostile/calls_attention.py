"""Valid calls of decode, prefill and mixed attention, and what they must do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, Options, Table, require
from hostile.parts import (
    FLOAT8,
    FLOATS,
    OPTIONS,
    PAIRS,
    SCALES,
    Pages,
    State,
    as_list,
    batch,
    cache_given,
    cache_of,
    drawn,
    dtypes_planned,
    gathered_of,
    heads_of,
    index_arrays,
    layout_of,
    mask_of,
    narrow,
    offsets,
    options,
    outputs,
    plain,
    results_of,
    sides_checked,
    sinks_of,
    some_results,
    table_of_lengths,
    tensors,
    widened,
)
from hostile.transforms import Arguments, Rng
from paged_kv.attention import BatchAttention
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)


class Single:
    """`single_decode_with_kv_cache` and `single_prefill_with_kv_cache`."""

    def __init__(self, mode: str) -> None:
        self.decodes = mode == "decode"
        self.name = f"single_{mode}"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        hk, dim, length = int(rng.choice([1, 2])), int(rng.choice([64, 64, 8])), int(rng.choice([0, 1, 5, 33]))
        layout, rows = str(rng.choice(["NHD", "HND"])), int(rng.choice([0, 1, 3, 9]))
        shape = (length, hk, dim) if layout == "NHD" else (hk, length, dim)
        heads = (hk * int(rng.integers(1, 4)), dim)
        given = tensors(q=drawn(rng, memory, heads if self.decodes else (rows, *heads), q_dtype))
        given |= tensors(k=drawn(rng, memory, shape, kv_dtype), v=drawn(rng, memory, shape, kv_dtype))
        given |= plain(kv_layout=layout, return_lse=bool(rng.integers(2))) | options(rng)
        if self.decodes:
            return given | (plain(q_scale=None, k_scale=0.5, v_scale=2.0) if rng.random() < 0.3 else {})
        if rng.random() < 0.3:
            given |= tensors(custom_mask=memory.put(rng.random((rows, length)) < 0.6))
        return given | plain(causal=bool(rng.integers(2)))

    def steps(self) -> list[tuple[Any, Any]]:
        function: Any = single_decode_with_kv_cache if self.decodes else single_prefill_with_kv_cache
        return [(lambda given, _: as_list(function(**given)), self.expected)]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        layout = layout_of(given)
        q = model.array(given["q"], *[None] * (2 if self.decodes else 3), dtypes=[*FLOATS, *FLOAT8])
        k, v = (model.array(given[name], None, None, None) for name in ("k", "v"))
        require(k.dtype == v.dtype and k.shape[: 3 if self.decodes else 2] == v.shape[: 3 if self.decodes else 2], "v")
        result_dtype, q = q.dtype, widened(q[None] if self.decodes else q, k.dtype)
        require(q.dtype.name in FLOATS and (k.dtype == q.dtype or k.dtype.name in FLOAT8), "dtypes")
        keys, vals = (x if layout == "NHD" else x.swapaxes(0, 1) for x in (k, v))
        require(max(len(keys), len(q)) < 10**6 and keys.shape[1] and q.shape[1], "size")
        require(q.shape[1] % keys.shape[1] == 0 and keys.shape[2] == q.shape[2], "heads")
        require(all(8 <= dim <= 512 and dim % 8 == 0 for dim in (q.shape[2], vals.shape[2])), "head_dim")
        scales = tuple(given[name].value if name in given else None for name in SCALES)
        causal = self.decodes or model.truth(given["causal"].value)
        row_masks = model.last_rows([len(q)], [len(keys)], causal, mask_of(given, [len(q)], [len(keys)]))
        o, lse = model.attention(q, [keys], [vals], Options.of(given), scales, None, row_masks, vals.shape[2])
        if self.decodes:
            for result in (o, lse):
                result.values, result.tolerance = result.values[0], np.asarray(result.tolerance)[0]
        narrow(o, result_dtype)
        return [o, lse] if model.truth(given["return_lse"].value) else [o]


ARRAYS = {
    "decode": ("indptr", "indices", "last_page_len"),
    "paged": ("qo_indptr", "indptr", "indices", "last_page_len"),
    "ragged": ("qo_indptr", "kv_indptr"),
    "mixed": ("qo_indptr", "indptr", "indices", "kv_len_arr"),
}
WRAPPERS: dict[str, Any] = {
    "decode": lambda layout: BatchDecodeWithPagedKVCacheWrapper(None, layout),
    "paged": lambda layout: BatchPrefillWithPagedKVCacheWrapper(None, layout),
    "ragged": lambda layout: BatchPrefillWithRaggedKVCacheWrapper(None, layout),
    "mixed": BatchAttention,
}
TABLE = ("indptr", "indices", "last_page_len")


class Wrapper:
    """The wrappers of decode, over pages and over ragged K and V, and `BatchAttention`: `plan`, then `run`.

    A decode's page table may live in buffers.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = f"wrapper_{mode}"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        mode, (q_dtype, kv_dtype) = self.mode, PAIRS[rng.integers(len(PAIRS))]
        lengths, counts, size = batch(rng)
        counts = np.ones_like(lengths) if mode == "decode" else counts
        hk, dim, layout = int(rng.choice([1, 2])), int(rng.choice([64, 64, 8])), str(rng.choice(["NHD", "HND"]))
        heads, total, rows = hk * int(rng.integers(1, 4)), int(lengths.sum()), int(counts.sum())
        pages = Pages(rng, lengths, size)
        found = {"qo_indptr": offsets(counts), "kv_indptr": offsets(lengths), "indptr": pages.indptr}
        found |= {"indices": pages.ids, "last_page_len": pages.last, "kv_len_arr": lengths}
        given = index_arrays(memory, **{name: found[name] for name in ARRAYS[mode]})
        given |= plain(num_qo_heads=heads, num_kv_heads=hk, head_dim=dim, page_size=size, kv_layout=layout)
        given |= plain(q_data_type=q_dtype, kv_data_type=kv_dtype)
        chosen = options(rng)
        if mode == "mixed":
            chosen = {name: chosen[name] for name in ("logits_soft_cap", "sm_scale") if name in chosen}
        given |= chosen | tensors(q=drawn(rng, memory, (rows, heads, dim), q_dtype))
        if mode == "ragged":
            spare = total + int(rng.integers(3))
            shape = (spare, hk, dim) if layout == "NHD" else (hk, spare, dim)
            given |= tensors(k=drawn(rng, memory, shape, kv_dtype), v=drawn(rng, memory, shape, kv_dtype))
        else:
            given |= cache_of(rng, memory, lengths, pages.ids, pages.pool, (size, hk, dim), kv_dtype, layout)
        if mode in ("paged", "ragged") and rng.random() < 0.3:
            given |= tensors(custom_mask=memory.put(rng.random(int((counts * lengths).sum())) < 0.6))
        if mode in ("decode", "paged") and rng.random() < 0.2:
            given |= tensors(sinks=drawn(rng, memory, (heads,), "float32"))
        given |= some_results(rng, memory, (rows, heads), dim, q_dtype)
        if rng.random() < 0.2:
            given |= plain(k_scale=0.5, v_scale=2.0)
        if mode == "decode":
            return given | self.of_decode(rng, memory, given)
        given |= plain(causal=bool(rng.integers(2)))
        return given if mode == "mixed" else given | plain(return_lse=bool(rng.integers(2)))

    def of_decode(self, rng: Rng, memory: Memory, given: Arguments) -> Arguments:
        """Buffers, a scale of q, and whether the older `forward` runs it."""
        found = plain(q_scale=2.0) if rng.random() < 0.2 else {}
        if rng.random() < 0.3:
            batch_size, ids = len(given["last_page_len"].view), len(given["indices"].view)
            found |= index_arrays(
                memory,
                indptr_buffer=np.zeros(batch_size + 1),
                indices_buffer=np.full(ids + int(rng.integers(3)), -7),
                last_page_len_buffer=np.zeros(batch_size),
            )
        by = "forward" if rng.random() < 0.2 and given.keys().isdisjoint({"out", "lse", "sinks"}) else "run"
        return found | plain(return_lse=bool(rng.integers(2)), _by=by)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.make, self.expect_made), (self.plan, self.expect_planned), (self.run, self.expect_run)]

    def make(self, given: dict[str, Any], state: State) -> None:
        if "indptr_buffer" in given:
            buffers = [given[f"{name}_buffer"] for name in TABLE]
            state["it"] = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers, kv_layout=given["kv_layout"])
        else:
            state["it"] = WRAPPERS[self.mode](given["kv_layout"])

    def plan(self, given: dict[str, Any], state: State) -> None:
        named = ("q_data_type", "kv_data_type", "causal", "custom_mask", *OPTIONS)
        sizes = [given[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim")]
        sizes += [given["head_dim"]] * (self.mode == "mixed") + [given["page_size"]] * (self.mode != "ragged")
        arrays = [given[name] for name in ARRAYS[self.mode]]
        state["it"].plan(*arrays, *sizes, **{name: given[name] for name in named if name in given})

    def run(self, given: dict[str, Any], state: State) -> list[Any]:
        cache = [given["k"], given["v"]] if self.mode == "ragged" else [cache_given(given)]
        named = {name: given[name] for name in ("out", "lse", "sinks", "return_lse", *SCALES) if name in given}
        if self.mode == "mixed":
            named["logits_soft_cap"] = given.get("logits_soft_cap")
        return results_of(getattr(state["it"], given.get("_by", "run"))(given["q"], *cache, **named), given)

    def expect_made(self, given: Arguments, _: State) -> list[Expected]:
        layout_of(given)
        if "indptr_buffer" in given:
            views = [model.array(given[f"{name}_buffer"], None, dtypes=["int32", "int64"]) for name in TABLE]
            require(len(views[0]) == len(views[2]) + 1, "buffers")
            model.written(*views)
        return []

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        size = 1 if self.mode == "ragged" else model.count(given["page_size"].value, 1)
        arrays = [model.indices(given[name]) for name in ARRAYS[self.mode]]
        qo, (indptr, *rest) = (None, arrays) if self.mode == "decode" else (arrays[0], arrays[1:])
        if self.mode == "mixed":
            table = table_of_lengths(indptr, *rest, size)
        elif self.mode == "ragged":
            require(len(indptr) and indptr[0] == 0 and (np.diff(indptr) >= 0).all(), "kv_indptr")
            table = Table([], np.diff(indptr).tolist())
        else:
            table = Table.csr(indptr, *rest, size)
        counts = [1] * len(table.lengths) if qo is None else model.row_counts(qo, len(table.lengths))
        state |= {"sizes": (*heads_of(given), size), "table": table, "options": Options.of(given), "indptr": indptr}
        state |= {"dtypes": dtypes_planned(given), "counts": counts}
        mask = mask_of(given, counts, table.lengths)
        state["mask"] = None if mask is None else mask.copy()
        state["causal"] = self.mode == "decode" or model.truth(given["causal"].value)
        if "indptr_buffer" in given:
            buffers = [given[f"{name}_buffer"].view for name in TABLE]
            require(len(buffers[2]) == len(rest[1]) and len(buffers[1]) >= indptr[-1], "buffers")
            for buffer, new in zip(buffers, (indptr, rest[0][: indptr[-1]], rest[1]), strict=True):
                buffer[: len(new)] = new
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, hk, dim, size = state["sizes"]
        buffers = [given[f"{name}_buffer"].view for name in TABLE if "indptr_buffer" in given]
        if buffers:  # they are what counts, and other arguments may lie in them
            state["table"] = Table.csr(*(buffer.astype(np.int64) for buffer in buffers), size)
        table, counts = state["table"], state["counts"]
        q = model.array(given["q"], sum(counts), heads, dim, dtypes=[state["dtypes"][0]])
        if self.mode == "ragged":
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
        if self.mode == "ragged" and q.dtype.name in FLOAT8:
            o.dtype = DTYPES["bfloat16"]
        else:
            narrow(o, q.dtype)
        outputs(given, state, o, lse, q, k, v, *buffers, *([] if sinks is None else [given["sinks"].view]))
        return [o, lse] if self.mode == "mixed" or model.truth(given["return_lse"].value) else [o]
