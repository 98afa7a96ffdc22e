"""Trees: the path that is kept is decoded on. How rows of a tree attend is in test_positions.py."""

import numpy as np
import pytest
import torch

import paged_kv
from paged_kv import reference
from support.compare import assert_close
from support.trees import path_to, random_parents

HEADS, KV_HEADS, DIM, CACHED, ROWS = 6, 2, 32, 21, 9


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_path_that_is_kept_is_decoded_on(page_size):
    """As docs/attention-calls.md moves it."""
    rng = np.random.default_rng(page_size)
    count = -(-(CACHED + ROWS) // page_size)
    pages = torch.from_numpy(rng.permutation(count + 2)[:count].astype(np.int32))
    k, v = (torch.from_numpy(rng.standard_normal((CACHED + ROWS, KV_HEADS, DIM), np.float32)) for _ in "kv")
    kv_cache = torch.full((count + 2, 2, page_size, KV_HEADS, DIM), torch.nan)
    table = pages, torch.tensor([0, count]), torch.tensor([(CACHED + ROWS - 1) % page_size + 1])

    def append(k, v, positions):
        paged_kv.append_paged_kv_cache(k, v, torch.zeros_like(positions), positions, kv_cache, *table)

    append(k, v, torch.arange(CACHED + ROWS))
    rows = path_to(random_parents(rng, ROWS), ROWS - 1)
    slots = CACHED + torch.tensor(rows)
    append(*kv_cache[pages[slots // page_size], :, slots % page_size].unbind(1), CACHED + torch.arange(len(rows)))

    length = CACHED + len(rows)
    used, last = -(-length // page_size), torch.tensor([(length - 1) % page_size + 1])
    wrapper = paged_kv.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(torch.tensor([0, used]), pages[:used], last, HEADS, KV_HEADS, DIM, page_size, q_data_type="float32")
    q = rng.standard_normal((1, HEADS, DIM), np.float32)
    tokens = [*range(CACHED), *slots.tolist()]
    one = np.zeros((1, 1), np.uint32), np.array([0]), np.array([length])
    expected, _ = reference.attention(q, k[tokens][None].numpy(), v[tokens][None].numpy(), *one)
    assert_close(wrapper.run(torch.from_numpy(q), kv_cache).numpy(), expected, rel=1e-5, what="o")
