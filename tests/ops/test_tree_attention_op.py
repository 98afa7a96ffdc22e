"""Attention over trees against the oracle, which decodes each row alone after the tokens of its path."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from paged_kv import reference
from paged_kv.graphs import ops, trees
from paged_kv.graphs.ops import PagedCache
from support import op_graphs
from support.attending import LSE_TOL, REL
from support.cases import UNUSED_PAGE, normal
from support.compare import assert_close, assert_lse_close
from support.trees import random_parents, seen_tokens

CPU = DeviceRef.CPU()
DIM, LARGEST = 40, 40
OPTIONS = {
    -1: {"logits_soft_cap": 3.0},
    2: {"sm_scale": 0.3, "v_scale": -0.5},
}
"""A graph for each window."""
DTYPES = ("float32", "bfloat16")


def append_and_attend(q, k, v, parents, offsets, lengths, table, sinks, blocks, *, window):
    """Appends the rows of trees to their slots, and attends."""
    cache = PagedCache.of(blocks, table)
    rows = trees.TreeRows.of(parents, offsets, lengths, window_left=window, largest_tree=LARGEST)
    ops.append(cache, k, v, rows.batch, rows.slots, layer=1)
    return trees.tree_attention(cache, q, rows, layer=1, sinks=sinks, **OPTIONS[window])


for kind in (DType[dtype] for dtype in DTYPES):
    types = [
        *(TensorType(kind, ["N", heads, DIM], CPU) for heads in ("Hq", "Hk", "Hk")),
        TensorType(DType.int32, ["N"], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.uint32, ["B"], CPU),
        TensorType(DType.uint32, ["B", "columns"], CPU),
        TensorType(DType.float32, ["Hq"], CPU),
        BufferType(kind, ["P", 2, "layers", "S", "Hk", DIM], CPU),
    ]
    for window in OPTIONS:
        op_graphs.add(f"tree_attention_{kind.name}_{window}", partial(append_and_attend, window=window), *types)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", OPTIONS)
@pytest.mark.parametrize(
    ("page_size", "group", "kv_heads"), [(1, 1, 2), (16, 4, 1), (5, 3, 2), (64, 8, 1), (16, 16, 1), (5, 5, 1)]
)
def test_each_row_is_as_if_its_branch_were_decoded_alone(dtype, window, page_size, group, kv_heads):
    rng = np.random.default_rng(page_size + group)
    # A request without rows, one without cached tokens, a long chain, trees of every kind.
    cached = np.array([19, 7, 0, 130, 64, 33])
    counts = np.array([12, 0, 9, 70, LARGEST, 1])
    parents = [random_parents(rng, count) for count in counts]
    parents[3] = np.arange(-1, counts[3] - 1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    padding = 2
    columns = -(-(cached + counts) // page_size)
    pages = rng.permutation(columns.sum() + 3)
    table = np.full((len(cached), columns.max() + 1), UNUSED_PAGE, np.uint32)
    blocks = np.full((len(pages), 2, 2, page_size, kv_heads, DIM), np.nan, dtype)
    keys, values = ([normal(rng, (n, kv_heads, DIM), dtype) for n in cached + counts] for _ in "kv")
    for b, used in enumerate(columns):
        table[b, :used], pages = pages[:used], pages[used:]
        at = np.arange(cached[b])
        where = table[b, at // page_size], at % page_size
        blocks[where[0], 0, 1, where[1]], blocks[where[0], 1, 1, where[1]] = keys[b][at], values[b][at]
    new = [np.concatenate([each[n:] for each, n in zip(side, cached, strict=True)]) for side in (keys, values)]
    new = [np.pad(rows, ((0, padding), (0, 0), (0, 0))) for rows in new]
    q = normal(rng, (len(new[0]), group * kv_heads, DIM), dtype)
    sinks = np.linspace(-4, 1, group * kv_heads).astype(np.float32)
    flat = np.concatenate([*parents, np.full(padding, -5, np.int32)])
    numbers = [flat, offsets.astype(np.uint32), cached.astype(np.uint32), table, sinks]
    o, lse = op_graphs.run(f"tree_attention_{dtype}_{window}", q, *new, *numbers, blocks)

    expected_o, expected_lse = np.zeros(o.shape), np.full(lse.shape, -np.inf)
    for b, of_request in enumerate(parents):
        for i in range(len(of_request)):
            path = seen_tokens(of_request, i, cached[b], window)
            alone = [np.stack([side[b][j] for j in path])[None] for side in (keys, values)]  # one page
            r = offsets[b] + i
            expected_o[r : r + 1], expected_lse[r : r + 1] = reference.attention(
                q[r : r + 1], *alone, np.zeros((1, 1), np.uint32), np.array([0]), np.array([len(path)]),
                sinks=sinks, **OPTIONS[window],
            )  # fmt: skip
    assert_close(o, expected_o, rel=REL[dtype], what="o")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what="lse")
