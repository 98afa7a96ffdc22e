"""The wrappers of graphs/ops.py in graphs that run: storage layouts as graph buffers, options, and the ragged rows."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from paged_kv import reference
from paged_kv.graphs import ops
from paged_kv.graphs.ops import PagedCache
from support import op_graphs
from support.cases import Cache, CacheCase, build, emptied
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import tokens_of
from support.harness import refused

CPU = DeviceRef.CPU()
F32, I32, U32 = DType.float32, DType.int32, DType.uint32


class Plan(NamedTuple):
    """One storage layout's graph: the shape of its buffers, and what differs from graph to graph."""

    blocks: list[int | str]
    options: dict  # which give sm_scale: head_dim is not static
    two_buffers: bool = False


PLANS = {
    (5, "HND"): Plan(["P", 2, "Hk", 8, "D"], {"sm_scale": -0.2, "logits_soft_cap": 2.0}, two_buffers=True),
    (6, "NHD"): Plan(["P", 2, "layers", "S", "Hk", "D"], {"sm_scale": 0.3, "window_left": 5}),
}
"""Those that differ most: MAX compiles 10 s for each."""


def case_of(storage):
    rank, layout = storage
    return CacheCase(lengths=(19, 0, 8, 1, 7), page_size=8, head_dim=16, rank=rank, layout=layout, seed=rank)


def types_of(storage):
    plan = PLANS[storage]

    def tensor(name, dtype, *shape):
        """A type whose dimensions are its own, so that only the op can compare them."""
        return TensorType(dtype, [f"{name}_{dim}" for dim in shape], CPU)

    return [
        tensor("k", F32, "N", "Hk", "D"),
        tensor("v", F32, "N", "Hk", "D"),
        tensor("batch_indices", I32, "N"),
        tensor("positions", I32, "N"),
        tensor("q", F32, "R", "Hq", "D"),
        tensor("row_batch", I32, "R"),
        tensor("row_lengths", I32, "R"),
        tensor("indptr", I32, "B_plus_1"),
        tensor("lookup_table", U32, "B", "max_pages"),
        *[BufferType(F32, plan.blocks, CPU)] * (1 + plan.two_buffers),
    ]


def append_attend_and_gather(
    k, v, batch_indices, positions, q, row_batch, row_lengths, indptr, table, *blocks, storage
):  # fmt: skip
    """Gathers as many tokens as it appended."""
    plan, (_, layout), layer = PLANS[storage], storage, case_of(storage).layer
    cache = PagedCache(*blocks, table, layout) if plan.two_buffers else PagedCache.of(*blocks, table, layout)
    ops.append(cache, k, v, batch_indices, positions, layer=layer)
    o, lse = ops.attention(cache, q, row_batch, row_lengths, layer=layer, **plan.options)
    return o, lse, *ops.gather(cache, indptr, k.shape[0], layer=layer)


for rank, layout in PLANS:
    make = partial(append_attend_and_gather, storage=(rank, layout))
    op_graphs.add(f"step_{layout}{rank}", make, *types_of((rank, layout)), by_max=True)
op_graphs.add(
    "ragged_rows",
    lambda row_offsets, cache_lengths, like: ops.ragged_rows(row_offsets, cache_lengths, like.shape[0]),
    *(TensorType(U32, ["offsets"], CPU), TensorType(U32, ["B"], CPU), TensorType(DType.int8, ["N"], CPU)),
    by_max=True,
)


class Step(NamedTuple):
    """The arguments of a layout's graph: all tokens of a cache, in random order, and one decode row a request."""

    k: np.ndarray
    v: np.ndarray
    batch_indices: np.ndarray
    positions: np.ndarray
    q: np.ndarray
    row_batch: np.ndarray
    row_lengths: np.ndarray
    indptr: np.ndarray
    lookup_table: np.ndarray
    k_blocks: np.ndarray
    v_blocks: np.ndarray

    @staticmethod
    def of(cache: Cache) -> "Step":
        order = np.random.default_rng(0).permutation(sum(cache.case.lengths))
        tokens = (column[order] for column in tokens_of(cache))
        indptr = np.concatenate([[0], np.cumsum(cache.lengths)]).astype(np.int32)
        blocks = emptied(cache)
        return Step(*tokens, cache.q, *cache.decode_rows, indptr, cache.lookup_table, blocks.k_blocks, blocks.v_blocks)

    def run(self, storage):
        rank, layout = storage
        arrays = self if PLANS[storage].two_buffers else self[:-1]
        return op_graphs.run(f"step_{layout}{rank}", *map(np.ascontiguousarray, arrays[:9]), *arrays[9:])


@pytest.mark.slow
@pytest.mark.parametrize("storage", PLANS, ids=lambda storage: f"{storage[1]}{storage[0]}")
def test_append_attend_and_gather_in_one_graph(storage):
    full = build(case_of(storage))
    step = Step.of(full)
    o, lse, k, v = step.run(storage)
    assert_bits_equal(step.k_blocks, full.k_blocks, what="k_blocks")
    assert_bits_equal(step.v_blocks, full.v_blocks, what="v_blocks")
    assert_bits_equal(k, np.concatenate(full.keys), what="gathered k")
    assert_bits_equal(v, np.concatenate(full.values), what="gathered v")
    options = PLANS[storage].options
    expected_o, expected_lse = reference.attention(full.q, *full.pages, *full.decode_rows, **full.storage, **options)
    assert_close(o, expected_o, rel=1e-5, what="o")
    assert_lse_close(lse, expected_lse, tol=1e-5, what="lse")


@pytest.mark.slow
@pytest.mark.parametrize("storage", PLANS, ids=lambda storage: f"{storage[1]}{storage[0]}")
@pytest.mark.parametrize(
    ("name", "cut", "words"),
    [
        ("k", np.s_[:, :1], ["k", "KV heads", 1, 2]),
        ("k", np.s_[..., :8], ["k", "head_dim", 8, 16]),
        ("v", np.s_[:-1], ["v", 34, 35]),
        ("v", np.s_[:, :1], ["v", "KV heads", 1, 2]),
        ("v", np.s_[..., :8], ["v", "head_dim", 8, 16]),
        ("batch_indices", np.s_[:-1], ["batch_indices", 34, 35]),
        ("positions", np.s_[:-1], ["positions", 34, 35]),
        ("q", np.s_[:, :3], ["q", "3 heads", "2 KV heads"]),
        ("q", np.s_[..., :8], ["q", "head_dim", 8, 16]),
        ("row_batch", np.s_[:-1], ["row_batch", 4, 5]),
        ("row_lengths", np.s_[:-1], ["row_lengths", 4, 5]),
        ("indptr", np.s_[:-1], ["indptr", 5, 6]),
    ],
)
def test_sizes_that_only_the_run_shows(storage, name, cut, words):
    step = Step.of(build(case_of(storage)))
    step = step._replace(**{name: getattr(step, name)[cut]})
    writes_first = name in ("q", "row_batch", "row_lengths", "indptr")  # the append before them is in order
    with refused(*words, unchanged=() if writes_first else (step.k_blocks, step.v_blocks)):
        step.run(storage)


@pytest.mark.slow
def test_layer_that_only_the_run_shows():
    step = Step.of(build(case_of((6, "NHD"))))
    blocks = step.k_blocks[:, :, :2].copy()
    with refused("layer", 2, unchanged=(blocks,)):
        step._replace(k_blocks=blocks).run((6, "NHD"))


@pytest.mark.slow
def test_one_array_is_expected_where_it_holds_both():
    step = Step.of(build(case_of((5, "HND"))))
    other = step.v_blocks.copy()
    with refused("v_blocks", "two arrays", unchanged=(step.k_blocks, other)):
        step._replace(v_blocks=other).run((5, "HND"))


# Every attention option: what the API can do, a graph can

HEADS, KV_HEADS, DIM = 6, 2, 40

# Name -> dtype of q, dtype of the cache, options, whether there are slopes and sinks, tolerance.
OPTIONS = {
    "biased": ("float32", "float32", {"logits_soft_cap": 3.0, "sm_scale": 0.4, "v_scale": -0.5}, True, 1e-5),
    "rotary_float8": (
        *("bfloat16", "float8_e5m2"),
        {"rope_theta": 500.0, "rope_scale": 2.0, "window_left": 9, "k_scale": 0.7, "v_scale": 1.5, "q_scale": 2.0},
        *(False, 2e-2),
    ),
}


def attend(q, row_batch, row_lengths, table, slopes, sinks, blocks, *, options, biased):
    heads = {"alibi_slopes": slopes, "sinks": sinks} if biased else {}
    return ops.attention(PagedCache.of(blocks, table), q, row_batch, row_lengths, **options, **heads)


for name, (q_dtype, kv_dtype, options, biased, _) in OPTIONS.items():
    types = [
        TensorType(DType[q_dtype], ["R", HEADS, DIM], CPU),
        TensorType(DType.int32, ["R"], CPU),
        TensorType(DType.int32, ["R"], CPU),
        TensorType(DType.uint32, ["B", "max_pages"], CPU),
        *[TensorType(DType.float32, [HEADS], CPU)] * 2,
        BufferType(DType[kv_dtype], ["pages", 2, "page_size", KV_HEADS, DIM], CPU),
    ]
    op_graphs.add(f"options_{name}", partial(attend, options=options, biased=biased), *types, by_max=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_a_graph(name):
    q_dtype, kv_dtype, options, biased, rel = OPTIONS[name]
    case = CacheCase((0, 1, 40, 17), HEADS, KV_HEADS, DIM, page_size=5, rank=5, dtype=kv_dtype)
    cache = build(case)
    q = cache.q.astype(q_dtype)
    slopes = np.linspace(0.05, -0.1, HEADS).astype(np.float32)
    sinks = np.linspace(-2, 4, HEADS).astype(np.float32)
    arrays = [q, *cache.decode_rows, cache.lookup_table, slopes, sinks, cache.k_blocks]
    o, lse = op_graphs.run(f"options_{name}", *arrays)
    heads = {"alibi_slopes": slopes, "sinks": sinks} if biased else {}
    expected = reference.attention(q, *cache.pages, *cache.decode_rows, **options, **heads)
    assert_close(o.astype(np.float64), expected[0], rel=rel, what="o")
    assert_lse_close(lse, expected[1], tol=1e-5, what="lse")


def ragged_rows(row_offsets, cache_lengths, num_rows):
    arrays = np.array(row_offsets, np.uint32), np.array(cache_lengths, np.uint32), np.zeros(num_rows, np.int8)
    return op_graphs.run("ragged_rows", *arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new_tokens", "cache_lengths", "num_rows"),
    [
        ((1, 1, 1), (4, 0, 9), 3),
        ((3, 1, 0, 5), (0, 7, 2, 100_000), 9),
        ((3, 1, 0, 5), (0, 7, 2, 100_000), 16),
        ((0, 0), (3, 4), 0),
        ((0, 0), (3, 4), 2),
        ((), (), 0),
        ((), (), 3),
    ],
)
def test_ragged_rows(new_tokens, cache_lengths, num_rows):
    offsets = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.uint32)
    expected = reference.ragged_rows(offsets, np.array(cache_lengths, np.uint32), num_rows)
    results = ragged_rows(offsets, cache_lengths, num_rows)
    for name, result, e in zip(("batch_indices", "positions"), results, expected, strict=True):
        assert_bits_equal(result, e, what=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([1, 2, 3], ["row_offsets", 1]),
        ([0, 3, 2], ["row_offsets", "request 1"]),
        ([0, 2, 6], ["row_offsets", 6, 5]),
        ([0, 2, 2**32 - 1], ["row_offsets", 2**32 - 1, 5]),
        ([0, 2], ["row_offsets", 2, 3]),
        ([0, 2, 3, 4], ["row_offsets", 4, 3]),
        ([], ["row_offsets", 0, 3]),
    ],
)
def test_row_offsets_that_are_refused(offsets, words):
    with refused(*words):
        ragged_rows(offsets, [5, 6], 5)
