"""The parts that calls of attention share: how their arguments are drawn, and how the model reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import DTYPES, Argument, Memory
from hostile.model import Expected, Table, require
from hostile.transforms import Arguments, Rng

PAIRS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
FLOATS, FLOAT8 = ("float32", "float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2")
OPTIONS = ("pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
SCALES = ("q_scale", "k_scale", "v_scale")
State = dict[str, Any]


def offsets(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def batch(rng: Rng, most: int = 5) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens and query rows of some requests, of which one may have more rows than tokens; page_size."""
    size = int(rng.choice([1, 4, 16]))
    lengths = rng.choice([0, 1, size, size + 1, 3 * size, 2 * size + 1], int(rng.integers(0, most)))
    return lengths, rng.choice([0, 1, 2, 3, 7, 20], len(lengths)), size


class Pages:
    """Pages of requests of some lengths, shuffled, in a pool that has more."""

    def __init__(self, rng: Rng, lengths: np.ndarray, size: int) -> None:
        used = -(-lengths // size)
        self.pool = int(used.sum()) + int(rng.integers(1, 4))
        self.ids = rng.permutation(self.pool)[: used.sum()]
        self.indptr = offsets(used)
        self.last = np.where(lengths > 0, (lengths - 1) % size + 1, 0)


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
    """The dtypes of q and of the cache."""
    found: list[Any] = [dtype_named(given[name].value) for name in ("q_data_type", "kv_data_type")]
    found[1] = found[0] if given["kv_data_type"].value is None else found[1]
    require(found[0] in FLOATS + FLOAT8 and found[1] in FLOATS + FLOAT8, "dtypes")
    require(found[1] == found[0] or not set(found) <= set(FLOATS), "dtypes")  # float8 goes with any
    return found


def dtype_named(value: Any) -> str | None:
    """The name of a dtype, however it is given."""
    if isinstance(value, str):
        return value.removeprefix("torch.")
    try:
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else np.dtype(value).name
    except Exception:
        return None


def table_of_lengths(indptr: np.ndarray, ids: np.ndarray, lengths: np.ndarray, size: int) -> Table:
    """Requests whose lengths are given in tokens."""
    require(len(indptr) == len(lengths) + 1 and indptr[0] == 0 and (np.diff(indptr) >= 0).all(), "indptr")
    require(indptr[-1] <= len(ids) and (lengths >= 0).all() and (lengths < 2**31).all(), "indices")
    used = -(-lengths // size)
    require((used <= np.diff(indptr)).all(), "pages")
    return Table([ids[a : a + n] for a, n in zip(indptr, used, strict=False)], lengths.tolist())


def mask_of(given: Arguments, counts: list[int], lengths: list[int]) -> np.ndarray | None:
    """The bits of a `custom_mask`, flattened."""
    if "custom_mask" not in given or given["custom_mask"].value is None:
        return None
    mask = model.array(given["custom_mask"], dtypes=["bool"])
    shapes = [(sum(n * length for n, length in zip(counts, lengths, strict=True)),)]
    shapes += [(counts[0], lengths[0])] if len(counts) == 1 else []
    require(mask.shape in shapes, "mask")
    return mask.reshape(-1)


def layout_of(given: Arguments) -> str:
    layout = given["kv_layout"].value
    require(isinstance(layout, str) and layout in ("NHD", "HND"), "layout")
    return str(layout)


def heads_of(given: Arguments) -> tuple[int, int, int]:
    """Hq, Hk and D of a plan."""
    heads, hk, dim = (model.count(given[name].value, 1) for name in ("num_qo_heads", "num_kv_heads", "head_dim"))
    require(heads % hk == 0 and 8 <= dim <= 512 and dim % 8 == 0, "sizes")
    return heads, hk, dim


def as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def results_of(found: Any, given: dict[str, Any]) -> list[Any]:
    """The results of a run; those that were asked for in an array are that array."""
    results = as_list(found)
    for name, result in zip(("out", "lse"), results, strict=False):
        assert given.get(name) is None or result is given[name], f"the result is not {name}"
    return results


def cache_given(given: dict[str, Any]) -> Any:
    """The cache as a call takes it."""
    return given["cache"] if "cache" in given else (given["k"], given["v"])


def some_results(rng: Rng, memory: Memory, rows: tuple[int, int], width: int, dtype: str) -> Arguments:
    """Arrays for some of the results of a run."""
    given: Arguments = {}
    if rng.random() < 0.3:
        given |= tensors(out=memory.new((*rows, width), DTYPES[dtype]))
    if rng.random() < 0.3:
        given |= tensors(lse=memory.new(rows, DTYPES["float32"]))
    return given
