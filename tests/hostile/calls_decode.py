"""Valid calls of decode attention, and what they must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Argument, Memory
from hostile.model import Expected, Options, Table, require
from hostile.transforms import Arguments, Rng
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)

PAIRS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
FLOATS, FLOAT8 = ("float32", "float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2")
State = dict[str, Any]


def plain(**given: Any) -> Arguments:
    return {name: Argument(value) for name, value in given.items()}


def tensors(**views: np.ndarray) -> Arguments:
    return {name: Argument(view, view, "numpy") for name, view in views.items()}


def index_arrays(memory: Memory, **lists: Any) -> Arguments:
    return {
        name: Argument(view := memory.put(np.array(numbers, np.int32)), view, "numpy", not name.endswith("_buffer"))
        for name, numbers in lists.items()
    }


def drawn(rng: Rng, memory: Memory, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return memory.put(rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype]))


def numbers_of(given: Arguments) -> dict[str, Any]:
    return {name: argument.value for name, argument in given.items()}


def options(rng: Rng) -> Arguments:
    """Some options of attention, each with an ordinary value."""
    found = {
        "pos_encoding_mode": str(rng.choice(["NONE", "ROPE_LLAMA", "ALIBI"])),
        "window_left": int(rng.choice([-1, 0, 3, 100])),
        "logits_soft_cap": [None, 0.0, 30.0][rng.integers(3)],
        "sm_scale": [None, 0.125, 1.0][rng.integers(3)],
        "rope_scale": [None, 2.0][rng.integers(2)],
        "rope_theta": [None, 1e6][rng.integers(2)],
    }
    return plain(**{name: value for name, value in found.items() if rng.random() < 0.5})


def widened(q: np.ndarray, kv_dtype: np.dtype[Any]) -> np.ndarray:
    """Float8 queries in the cache's dtype or in bfloat16, which is exact; others as they are."""
    if q.dtype.name not in FLOAT8:
        return q
    with np.errstate(all="ignore"):
        return q.astype(DTYPES["bfloat16"] if kv_dtype.name in FLOAT8 else kv_dtype)


def narrow(o: Expected, dtype: np.dtype[Any]) -> None:
    """Makes an output one of float8; its rounding, which saturates, is for other tests."""
    if dtype.name in FLOAT8:
        o.values, o.dtype = np.full_like(o.values, np.nan), dtype


def sides_of(given: Arguments, layout: str) -> list[np.ndarray]:
    """K and V `[page, slot, Hk, D]`."""
    both = [given["cache"].view[:, i] for i in (0, 1)] if "cache" in given else [given["k"].view, given["v"].view]
    return both if layout == "NHD" else [side.swapaxes(1, 2) for side in both]


def sides_checked(given: Arguments) -> list[np.ndarray]:
    if "cache" in given:
        require(model.array(given["cache"], None, 2, None, None, None) is not None, "cache")
    else:
        model.array(given["k"], None, None, None, None)
        model.array(given["v"], None, None, None, None)
    return sides_of(given, given["kv_layout"].value)


def cache_of(
    rng: Rng,
    memory: Memory,
    lengths: np.ndarray,
    ids: np.ndarray,
    pages: int,
    page: tuple[int, int, int],
    dtype: str,
    layout: str,
) -> Arguments:
    """A cache of pages of (page_size, Hk, D) that holds the tokens of some requests, in the order of their ids."""
    size, hk, dim = page
    shape = page if layout == "NHD" else (hk, size, dim)
    if rng.random() < 0.5:
        given = tensors(cache=memory.new((pages, 2, *shape), DTYPES[dtype]))
    else:
        given = tensors(k=memory.new((pages, *shape), DTYPES[dtype]), v=memory.new((pages, *shape), DTYPES[dtype]))
    used = -(-lengths // size)
    for side in sides_of(given, layout):  # unused slots and pages stay NaN
        for b, length in enumerate(lengths.tolist()):
            for j in range(length):
                page_id = ids[used[:b].sum() + j // size]
                side[page_id, j % size] = rng.standard_normal((hk, dim)).astype(np.float32)
    return given


def gathered_of(side: np.ndarray, table: Table, page: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """The tokens of each request, out of a cache that has to fit the plan."""
    require(side.dtype == DTYPES[dtype] and side.shape[1:] == page, "cache")
    table.check(len(side))
    return [
        side[pages[np.arange(n) // page[0]], np.arange(n) % page[0]]
        for pages, n in zip(table.pages, table.lengths, strict=True)
    ]


def sinks_of(given: Arguments, heads: int) -> np.ndarray | None:
    if "sinks" not in given or given["sinks"].value is None:
        return None
    sinks = model.array(given["sinks"], heads, dtypes=["float32", "float16", "bfloat16"]).astype(np.float64)
    require((np.isfinite(sinks) | np.isneginf(sinks)).all(), "sinks")
    return sinks


def outputs(given: Arguments, state: State, o: Expected, lse: Expected, *others: np.ndarray) -> None:
    """Notes what is to be written to `out` and `lse`, which may share no memory with the others."""
    views = []
    for name, wanted in (("out", o), ("lse", lse)):
        if name in given and given[name].value is not None:
            views.append(model.array(given[name], *wanted.values.shape))
            require(views[-1].dtype == wanted.dtype, "dtype of an output")
            state.setdefault("written", []).append((views[-1], wanted))
    model.written(*views, others=others)


def dtypes_planned(given: Arguments) -> list[str]:
    """Of q and of the cache."""
    found: list[Any] = [dtype_named(given[name].value) for name in ("q_data_type", "kv_data_type")]
    found[1] = found[0] if given["kv_data_type"].value is None else found[1]
    require(found[0] in FLOATS + FLOAT8 and found[1] in FLOATS + FLOAT8, "dtypes")
    require(found[1] == found[0] or not set(found) <= set(FLOATS), "dtypes")  # float8 goes with any
    return found


@dataclass
class Single:
    """`single_decode_with_kv_cache`."""

    name = "single_decode"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        hk, dim, length = int(rng.choice([1, 2])), int(rng.choice([64, 64, 8])), int(rng.choice([0, 1, 5, 33]))
        layout = str(rng.choice(["NHD", "HND"]))
        shape = (length, hk, dim) if layout == "NHD" else (hk, length, dim)
        q = drawn(rng, memory, (hk * int(rng.integers(1, 4)), dim), q_dtype)
        arrays = tensors(q=q, k=drawn(rng, memory, shape, kv_dtype), v=drawn(rng, memory, shape, kv_dtype))
        scales = plain(q_scale=None, k_scale=0.5, v_scale=2.0) if rng.random() < 0.3 else {}
        return arrays | plain(kv_layout=layout, return_lse=bool(rng.integers(2))) | options(rng) | scales

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.run, self.expected)]

    def run(self, given: dict[str, Any], _: State) -> list[Any]:
        found = single_decode_with_kv_cache(**given)
        return list(found) if isinstance(found, tuple) else [found]

    def expected(self, given: Arguments, _: State) -> list[Expected]:
        layout = given["kv_layout"].value
        require(isinstance(layout, str) and layout in ("NHD", "HND"), "layout")
        q = model.array(given["q"], None, None, dtypes=[*FLOATS, *FLOAT8])
        k, v = model.array(given["k"], None, None, None), model.array(given["v"], None, None, None)
        require(k.shape == v.shape and k.dtype == v.dtype, "k and v")
        result_dtype, q = q.dtype, widened(q, k.dtype)
        require(q.dtype.name in FLOATS and (k.dtype == q.dtype or k.dtype.name in FLOAT8), "dtypes")
        keys, vals = (x if layout == "NHD" else x.swapaxes(0, 1) for x in (k, v))
        require(len(keys) < 10**6 and keys.shape[1], "size")
        require(q.shape[0] and q.shape[0] % keys.shape[1] == 0 and keys.shape[2] == q.shape[1], "heads")
        require(8 <= q.shape[1] <= 512 and q.shape[1] % 8 == 0, "head_dim")
        scales = tuple(given[name].value if name in given else None for name in ("q_scale", "k_scale", "v_scale"))
        o, lse = model.attention(q[None], [keys], [vals], Options.of(given), scales)
        o.values, o.tolerance, lse.values, lse.tolerance = o.values[0], o.tolerance[0], lse.values[0], lse.tolerance[0]
        narrow(o, result_dtype)
        return [o, lse] if model.truth(given["return_lse"].value) else [o]


PLAN = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
OPTIONS = ("pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
SCALES = ("q_scale", "k_scale", "v_scale")


class Wrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` and its subclass: `plan`, then `run`."""

    name = "wrapper"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        q_dtype, kv_dtype = PAIRS[rng.integers(len(PAIRS))]
        hk, dim, size = int(rng.choice([1, 2])), int(rng.choice([64, 64, 8])), int(rng.choice([1, 4, 16]))
        heads, layout = hk * int(rng.integers(1, 4)), str(rng.choice(["NHD", "HND"]))
        lengths = rng.choice([0, 1, size, size + 1, 3 * size, 2 * size + 1], int(rng.integers(0, 5)))
        used = -(-lengths // size)
        pages = int(used.sum()) + int(rng.integers(1, 4))
        ids = rng.permutation(pages)[: used.sum()]
        last = np.where(lengths > 0, (lengths - 1) % size + 1, 0)
        given = index_arrays(memory, indptr=np.concatenate([[0], np.cumsum(used)]), indices=ids, last_page_len=last)
        given |= plain(num_qo_heads=heads, num_kv_heads=hk, head_dim=dim, page_size=size)
        given |= plain(kv_layout=layout, q_data_type=q_dtype, kv_data_type=kv_dtype) | options(rng)
        given |= tensors(q=drawn(rng, memory, (len(lengths), heads, dim), q_dtype))
        given |= cache_of(rng, memory, lengths, ids, pages, (size, hk, dim), kv_dtype, layout)
        if rng.random() < 0.3:
            given |= tensors(out=memory.new((len(lengths), heads, dim), DTYPES[q_dtype]))
        if rng.random() < 0.3:
            given |= tensors(lse=memory.new((len(lengths), heads), DTYPES["float32"]))
        if rng.random() < 0.2:
            given |= tensors(sinks=drawn(rng, memory, (heads,), "float32"))
        if rng.random() < 0.2:
            given |= plain(q_scale=2.0, k_scale=0.5, v_scale=None)
        if rng.random() < 0.3:
            given |= index_arrays(
                memory,
                indptr_buffer=np.zeros(len(lengths) + 1),
                indices_buffer=np.full(len(ids) + int(rng.integers(3)), -7),
                last_page_len_buffer=np.zeros(len(lengths)),
            )
        by = "forward" if rng.random() < 0.2 and given.keys().isdisjoint({"out", "lse", "sinks"}) else "run"
        return given | plain(return_lse=bool(rng.integers(2)), _by=by)

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.make, self.expect_made), (self.plan, self.expect_planned), (self.run, self.expect_run)]

    def make(self, given: dict[str, Any], state: State) -> None:
        if "indptr_buffer" in given:
            buffers = [given[f"{name}_buffer"] for name in PLAN[:3]]
            state["it"] = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers, kv_layout=given["kv_layout"])
        else:
            state["it"] = BatchDecodeWithPagedKVCacheWrapper(None, given["kv_layout"])

    def plan(self, given: dict[str, Any], state: State) -> None:
        named = {name: given[name] for name in (*OPTIONS, "q_data_type", "kv_data_type") if name in given}
        state["it"].plan(*(given[name] for name in PLAN), **named)

    def run(self, given: dict[str, Any], state: State) -> Any:
        cache = given["cache"] if "cache" in given else (given["k"], given["v"])
        named = {n: given[n] for n in ("out", "lse", "sinks", "return_lse", *SCALES) if n in given}
        found = getattr(state["it"], given["_by"])(given["q"], cache, **named)
        results = list(found) if isinstance(found, tuple) else [found]
        for name, result in zip(("out", "lse"), results, strict=False):
            assert given.get(name) is None or result is given[name], f"the result is not {name}"
        return results

    def expect_made(self, given: Arguments, _: State) -> list[Expected]:
        require(isinstance(given["kv_layout"].value, str) and given["kv_layout"].value in ("NHD", "HND"), "layout")
        if "indptr_buffer" in given:
            views = [model.array(given[f"{name}_buffer"], None, dtypes=["int32", "int64"]) for name in PLAN[:3]]
            require(len(views[0]) == len(views[2]) + 1, "buffers")
            model.written(*views)
        return []

    def expect_planned(self, given: Arguments, state: State) -> list[Expected]:
        indptr, ids, last = (model.indices(given[name]) for name in PLAN[:3])
        heads, hk, dim, size = (model.count(given[name].value, 1) for name in PLAN[3:])
        require(heads % hk == 0 and 8 <= dim <= 512 and dim % 8 == 0, "sizes")
        dtypes = dtypes_planned(given)
        state |= {"sizes": (heads, hk, dim, size), "dtypes": dtypes, "options": Options.of(given)}
        state["table"] = Table.csr(indptr, ids, last, size)
        if "indptr_buffer" in given:
            buffers = [given[f"{name}_buffer"].view for name in PLAN[:3]]
            require(len(buffers[2]) == len(last) and len(buffers[1]) >= indptr[-1], "buffers")
            for buffer, new in zip(buffers, (indptr, ids[: indptr[-1]], last), strict=True):
                buffer[: len(new)] = new
        return []

    def expect_run(self, given: Arguments, state: State) -> list[Expected]:
        heads, hk, dim, size = state["sizes"]
        if "indptr_buffer" in given:  # they are what counts, and other arguments may lie in them
            indptr, ids, last = (given[f"{name}_buffer"].view.astype(np.int64) for name in PLAN[:3])
            state["table"] = Table.csr(indptr, ids, last, size)
        table = state["table"]
        q = model.array(given["q"], len(table.lengths), heads, dim, dtypes=[state["dtypes"][0]])
        k, v = sides_checked(given)
        gathered = [gathered_of(side, table, (size, hk, dim), state["dtypes"][1]) for side in (k, v)]
        require(k.shape == v.shape, "k and v")
        sinks = sinks_of(given, heads)
        scales = tuple(given[name].value if name in given else None for name in SCALES)
        o, lse = model.attention(widened(q, k.dtype), *gathered, state["options"], scales, sinks)
        narrow(o, q.dtype)
        buffers = [given[f"{name}_buffer"].view for name in PLAN[:3] if "indptr_buffer" in given]
        outputs(given, state, o, lse, q, k, v, *buffers, *([] if sinks is None else [given["sinks"].view]))
        return [o, lse] if model.truth(given["return_lse"].value) else [o]


def dtype_named(value: Any) -> str | None:
    """The name of a dtype, however it is given."""
    if isinstance(value, str):
        return value.removeprefix("torch.")
    try:
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else np.dtype(value).name
    except Exception:
        return None
