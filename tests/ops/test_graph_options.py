"""Every attention option inside a MAX graph: what the API can do, a graph can."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from paged_kv import reference
from paged_kv.graphs import ops
from paged_kv.graphs.ops import PagedCache
from support import op_graphs
from support.cases import CacheCase, build
from support.compare import assert_close, assert_lse_close

CPU = DeviceRef.CPU()
HEADS, KV_HEADS, DIM = 6, 2, 40

# Name -> dtype of q, dtype of the cache, options, whether there are slopes and sinks, tolerance.
GRAPHS = {
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


for name, (q_dtype, kv_dtype, options, biased, _) in GRAPHS.items():
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
@pytest.mark.parametrize("name", GRAPHS)
def test_options_in_a_graph(name):
    q_dtype, kv_dtype, options, biased, rel = GRAPHS[name]
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
