"""Valid calls of latent attention, and what they must do."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Memory
from hostile.model import Expected, Options, require
from hostile.parts import (
    FLOAT8,
    FLOATS,
    PAIRS,
    Pages,
    State,
    batch,
    drawn,
    dtypes_planned,
    index_arrays,
    offsets,
    outputs,
    plain,
    results_of,
    sinks_of,
    some_results,
    table_of_lengths,
    tensors,
    widened,
)
from hostile.transforms import Arguments, Rng
from paged_kv.mla import BatchMLAPagedAttentionWrapper

ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
SIZES = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size")
PLAN = (*ARRAYS, *SIZES, "causal", "sm_scale", "q_data_type", "kv_data_type")


class Latent:
    """`BatchMLAPagedAttentionWrapper`: `plan`, then `run`."""

    name = "mla"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        lengths, counts, size = batch(rng, 4)
        heads, ckv, kpe = int(rng.choice([1, 3, 16])), int(rng.choice([64, 8])), int(rng.choice([0, 8, 16]))
        pages, rows = Pages(rng, lengths, size), int(counts.sum())
        arrays = (offsets(counts), pages.indptr, pages.ids, lengths)
        given = index_arrays(memory, **dict(zip(ARRAYS, arrays, strict=True)))
        given |= plain(num_heads=heads, head_dim_ckv=ckv, head_dim_kpe=kpe, page_size=size)
        given |= plain(causal=bool(rng.integers(2)), sm_scale=float(rng.choice([0.1, 1.0])))
        given |= plain(q_data_type=q_dtype, kv_data_type=kv_dtype)
        for name, width in (("q_nope", ckv), ("q_pe", kpe)):
            given |= tensors(**{name: drawn(rng, memory, (rows, heads, width), q_dtype)})
        for name, width in (("ckv_cache", ckv), ("kpe_cache", kpe)):
            cache = memory.new((pages.pool, size, width), DTYPES[kv_dtype])
            for b, length in enumerate(lengths.tolist()):  # other slots stay NaN
                for j in range(length):
                    page = pages.ids[pages.indptr[b] + j // size]
                    cache[page, j % size] = rng.standard_normal(width).astype(np.float32)
            given |= tensors(**{name: cache})
        if kv_dtype in FLOAT8:
            given |= plain(ckv_scale=0.5, kpe_scale=float(rng.choice([0.5, 2.0])))
        given |= some_results(rng, memory, (rows, heads), ckv, q_dtype)
        if rng.random() < 0.2:
            given |= tensors(sinks=drawn(rng, memory, (heads,), "float32"))
        return given | plain(return_lse=bool(rng.integers(2)))

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.plan, self.expect_planned), (self.run, self.expect_run)]

    def plan(self, given: dict[str, Any], state: State) -> None:
        state["it"] = BatchMLAPagedAttentionWrapper(None)
        state["it"].plan(*(given[name] for name in PLAN))

    def run(self, given: dict[str, Any], state: State) -> list[Any]:
        found = state["it"].run(**{name: value for name, value in given.items() if name not in PLAN})
        return results_of(found, given)

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        sizes = heads, ckv, kpe, size = tuple(
            model.count(given[name].value, 0 if name == "head_dim_kpe" else 1) for name in SIZES
        )
        require(heads <= 2**16 and all(w % 8 == 0 and w <= 512 for w in (ckv, kpe)), "sizes")
        qo, indptr, ids, lengths = (model.indices(given[name]) for name in ARRAYS)
        # Only so many offsets count as there are requests.
        table = table_of_lengths(indptr[: len(lengths) + 1], ids, lengths, size)
        state |= {"sizes": sizes, "table": table, "counts": model.row_counts(qo, len(table.lengths))}
        require(given["sm_scale"].value is not None and given["causal"].value is not None, "needed")
        state["options"], state["causal"] = Options.of(given), model.truth(given["causal"].value)
        require(given["q_data_type"].value is not None, "needed")
        state["dtypes"] = dtypes_planned(given)
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, ckv, kpe, size = state["sizes"]
        table, counts, (q_dtype, kv_dtype) = state["table"], state["counts"], state["dtypes"]
        queries = [
            model.array(given[name], sum(counts), heads, width, dtypes=[q_dtype])
            for name, width in (("q_nope", ckv), ("q_pe", kpe))
        ]
        caches = [
            model.array(given[name], None, size, width, dtypes=[kv_dtype])
            for name, width in (("ckv_cache", ckv), ("kpe_cache", kpe))
        ]
        require(len(caches[0]) == len(caches[1]), "pages")
        table.check(len(caches[0]))
        given_scales = [given[name].value if name in given else None for name in ("ckv_scale", "kpe_scale")]
        require(all((scale is not None) == (kv_dtype in FLOAT8) for scale in given_scales), "scales")
        ckv_scale, kpe_scale = (model.number(scale, 1.0, 5e-324) for scale in given_scales)
        values, rotary = (
            [
                cache[pages[np.arange(n) // size], np.arange(n) % size]
                for pages, n in zip(table.pages, table.lengths, strict=True)
            ]
            for cache in caches
        )
        with np.errstate(all="ignore"):
            keys = [
                np.concatenate([a.astype(np.float64) * ckv_scale, b.astype(np.float64) * kpe_scale], 1)[:, None]
                for a, b in zip(values, rotary, strict=True)
            ]
        q = np.concatenate([widened(part, DTYPES[kv_dtype]) for part in queries], 2)
        sinks = sinks_of(given, heads)
        row_masks = model.last_rows(counts, table.lengths, state["causal"])
        vals = [part[:, None] for part in values]
        o, lse = model.attention(q, keys, vals, state["options"], (None, None, ckv_scale), sinks, row_masks, ckv)
        require(q.dtype.name in FLOATS, "q")
        outputs(given, state, o, lse, *queries, *caches, *([] if sinks is None else [given["sinks"].view]))
        return [o, lse] if model.truth(given["return_lse"].value) else [o]
