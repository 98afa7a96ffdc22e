"""Keys that lie un-rotated in the cache, and are rotated when they are read, on every path through the kernels."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from support import harness
from support.attending import compare_with_oracle
from support.cases import STORAGES, UNUSED_PAGE, CacheCase, build, causal_rows, permuted
from support.compare import assert_bits_equal
from support.grids import all_pairs, case_of, setting_id

GRID = all_pairs(
    {"pair": harness.PAIRS, "head_dim": (8, 24, 40, 64, 80, 96, 128, 136, 192, 256, 512)}
    | {"group": (1, 2, 3, 4, 5, 8, 16), "num_kv_heads": (1, 2, 3), "page_size": (1, 5, 16, 64), "storage": STORAGES}
    | {"lengths": ((300, 0, 90), (129, 1), (31, 32, 33, 0), (700,)), "new_tokens": (1, 2, 9, 70)}
    | {"rope": ((1e4, 1.0), (5e5, 8.0), (10.0, 0.25)), "window_left": (-1, 0, 40), "alibi": (False, True)}
)
compare = partial(compare_with_oracle, harness.attention)


def rows_in(cache, new_tokens, q_dtype):
    """Causal rows whose queries have another dtype than the cache."""
    q, *rows = causal_rows(cache, [min(length, new_tokens) for length in cache.case.lengths])
    return q.astype(np.float32).astype(q_dtype), *rows


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_grid(setting):
    """Another order of pages changes no bit."""
    q_dtype, kv_dtype = setting["pair"]
    theta, scale = setting["rope"]
    case = case_of(setting | {"dtype": kv_dtype, "lengths": "edges"})
    cache = build(replace(case, lengths=setting["lengths"]))
    q, *rows = rows_in(cache, setting["new_tokens"], q_dtype)
    options = {"rope_theta": theta, "rope_scale": scale, "window_left": setting["window_left"]}
    if setting["alibi"]:
        options["alibi_slopes"] = np.linspace(-0.02, 0.02, case.num_q_heads)
    once = compare(cache, (q, *rows), **options)
    other = permuted(cache, np.random.default_rng(1))
    results = harness.attention(q, *other.pages, *rows, **other.storage, **options)
    for name, result, expected in zip(("o", "lse"), results, once, strict=True):
        assert_bits_equal(result, expected, what=name)


@pytest.mark.parametrize("new_tokens", [1, 70])
@pytest.mark.parametrize("pair", [("float32", "float32"), ("bfloat16", "bfloat16")], ids="-".join)
def test_far_positions(pair, new_tokens):
    """The last of a million tokens: in float32 their angles would be off by 0.06 radians."""
    base = 2**20
    q_dtype, kv_dtype = pair
    case = CacheCase((200,), num_q_heads=4, num_kv_heads=2, head_dim=128, page_size=64, dtype=kv_dtype)
    near = build(case)
    unused = np.full((1, base // case.page_size), UNUSED_PAGE, np.uint32)
    far = replace(near, lookup_table=np.hstack([unused, near.lookup_table]))
    q, row_batch, row_lengths = rows_in(near, new_tokens, q_dtype)
    compare(far, (q, row_batch, row_lengths + np.int32(base)), rope_theta=1e4, window_left=100)
