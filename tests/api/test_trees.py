"""Trees through the prefill wrapper: each row is as if its branch were decoded alone; a kept path is decoded on."""

import numpy as np
import pytest
import torch

import paged_kv
from paged_kv import reference
from support.compare import assert_close
from support.trees import path_to, random_parents, seen_tokens

HEADS, KV_HEADS, DIM = 6, 2, 32


class Batch:
    """Requests with trees at their ends, in torch; the pages that no request owns hold NaN."""

    def __init__(self, page_size, seed):
        rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.cached = np.array([21, 0, 5])
        self.parents = [random_parents(rng, count) for count in (9, 14, 1)]
        self.counts = np.array([len(of_request) for of_request in self.parents])
        lengths = self.cached + self.counts
        pages = -(-lengths // page_size)
        self.indptr = torch.tensor(np.concatenate([[0], np.cumsum(pages)]), dtype=torch.int32)
        self.indices = torch.tensor(rng.permutation(pages.sum() + 2)[: pages.sum()], dtype=torch.int32)
        self.last = torch.tensor((lengths - 1) % page_size + 1, dtype=torch.int32)
        self.offsets = torch.tensor(np.concatenate([[0], np.cumsum(self.counts)]), dtype=torch.int32)
        self.kv_cache = torch.full((int(pages.sum()) + 2, 2, page_size, KV_HEADS, DIM), torch.nan)
        self.k, self.v = ([torch.randn(n, KV_HEADS, DIM) for n in lengths] for _ in "kv")
        self.append([(b, j) for b, length in enumerate(lengths) for j in range(length)])

    @property
    def table(self):
        return self.indices, self.indptr, self.last

    def append(self, tokens):
        requests, positions = torch.tensor(tokens, dtype=torch.int32).T.contiguous()
        k, v = (torch.stack([of[b][j] for b, j in tokens]) for of in (self.k, self.v))
        paged_kv.append_paged_kv_cache(k, v, requests, positions, self.kv_cache, *self.table)

    def alone(self, q, request, tokens):
        """The oracle's o of one query `[Hq, D]` over some tokens of a request, in this order, as one page."""
        k, v = (of[request][tokens][None].numpy() for of in (self.k, self.v))
        one = np.array([len(tokens)])
        return reference.attention(q[None].numpy(), k, v, np.zeros((1, 1), np.uint32), np.array([0]), one)[0][0]


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_row_of_a_tree_is_as_if_its_branch_were_decoded_alone(page_size, window_left):
    torch.manual_seed(page_size)
    batch = Batch(page_size, seed=page_size)
    q = torch.randn(int(batch.offsets[-1]), HEADS, DIM)
    parents = torch.tensor(np.concatenate(batch.parents))
    mask = paged_kv.tree_mask(parents, batch.offsets, torch.tensor(batch.cached), window_left=window_left)
    wrapper = paged_kv.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(
        batch.offsets, batch.indptr, batch.indices, batch.last, HEADS, KV_HEADS, DIM, page_size,
        custom_mask=mask, q_data_type="float32",
    )  # fmt: skip
    o = wrapper.run(q, batch.kv_cache)
    expected = [
        batch.alone(q[int(batch.offsets[b]) + i], b, seen_tokens(of_request, i, batch.cached[b], window_left))
        for b, of_request in enumerate(batch.parents)
        for i in range(len(of_request))
    ]
    assert_close(o.numpy(), np.stack(expected), rel=1e-5, what="o")


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_path_that_is_kept_is_decoded_on(page_size):
    """As docs/attention-calls.md moves it."""
    torch.manual_seed(page_size)
    batch = Batch(page_size, seed=page_size)
    of_request = batch.parents[0]
    rows = path_to(of_request, len(of_request) - 1)
    cache_length = int(batch.cached[0])
    pages = batch.indices[: int(batch.indptr[1])]
    slots = cache_length + torch.tensor(rows)
    k, v = batch.kv_cache[pages[slots // page_size], :, slots % page_size].unbind(1)
    positions = cache_length + torch.arange(len(rows))
    paged_kv.append_paged_kv_cache(k, v, torch.zeros_like(positions), positions, batch.kv_cache, *batch.table)
    length = cache_length + len(rows)
    used = -(-length // page_size)
    wrapper = paged_kv.BatchDecodeWithPagedKVCacheWrapper(None)
    last = torch.tensor([(length - 1) % page_size + 1])
    wrapper.plan(torch.tensor([0, used]), pages[:used], last, HEADS, KV_HEADS, DIM, page_size, q_data_type="float32")
    q = torch.randn(1, HEADS, DIM)
    tokens = [*range(cache_length), *(cache_length + row for row in rows)]
    assert_close(wrapper.run(q, batch.kv_cache)[0].numpy(), batch.alone(q[0], 0, tokens), rel=1e-5, what="o")
