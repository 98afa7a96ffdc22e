"""Cascades for tests: levels of groups with shuffled pages of one poisoned pool, and the flat contexts they mean."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_kv import reference
from support.cases import SPARE_PAGES, normal


@dataclass(frozen=True)
class Cascade:
    """A built case.

    `tokens[l][g]` are the K and V `[n, Hk, D]` of group g of level l, kept apart from the pages.
    """

    q: np.ndarray
    """[T, Hq, D]"""
    cache: np.ndarray
    """`[pages, 2, page_size, Hk, D]`, or HND; NaN where no token lives"""
    layout: str
    tables: tuple[list[np.ndarray], ...]
    """qo_indptr, kv_indptr, kv_indices and last_page_len, a list of one array a level each"""
    tokens: list[list[tuple[np.ndarray, np.ndarray]]]
    sizes: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))
    """num_qo_heads, num_kv_heads, head_dim, page_size"""

    def oracle(self, mode: str = "NONE", causal: bool = False, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """O and lse of every row over its whole context, made contiguous."""
        qo_indptr = self.tables[0]
        extra = {"ROPE_LLAMA": {"rope_theta": 1e4}, "ALIBI": {"alibi_slopes": reference.alibi_slopes(self.q.shape[1])}}
        outputs, sums = [], []
        for t in range(len(self.q)):
            groups = [int(np.searchsorted(offsets, t, side="right")) - 1 for offsets in qo_indptr]
            parts = [level[g] for level, g in zip(self.tokens, groups, strict=True)]
            k, v = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
            behind = int(qo_indptr[-1][groups[-1] + 1]) - t - 1
            position = len(k) - behind - 1
            seen = max(position + 1, 0) if causal else len(k)
            o, lse = reference.masked_attention(
                self.q[t : t + 1],
                k[None],
                v[None],
                np.zeros((1, 1), np.uint32),
                np.zeros(1, np.int32),
                np.array([seen], np.int32),
                row_positions=np.array([position], np.int32),
                **extra.get(mode, {}),
                **options,
            )
            outputs.append(o)
            sums.append(lse)
        shape = self.q.shape
        return np.concatenate([np.zeros((0, *shape[1:])), *outputs]), np.concatenate([np.zeros((0, shape[1])), *sums])


def nested_offsets(rng: np.random.Generator, bottom: list[int], num_levels: int) -> list[np.ndarray]:
    """The qo_indptr of every level, the last of which has groups of `bottom[g]` rows; groups join at random above."""
    offsets = [np.concatenate([[0], np.cumsum(bottom)]).astype(np.int32)]
    for _ in range(num_levels - 1):
        inner = offsets[0][1:-1]
        kept = inner[rng.random(len(inner)) < 0.5]
        offsets.insert(0, np.concatenate([[0], kept, offsets[0][-1:]]).astype(np.int32))
    return offsets


def build_cascade(
    qo_indptr: list[np.ndarray],
    lengths: list[list[int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    page_size: int = 16,
    layout: str = "NHD",
    dtype: str = "float32",
    seed: int = 0,
) -> Cascade:
    """A cascade whose group g of level l has `lengths[l][g]` tokens."""
    rng = np.random.default_rng(seed)
    kv_heads = heads[1]
    counts = [[-(-length // page_size) for length in level] for level in lengths]
    pages = sum(map(sum, counts)) + SPARE_PAGES
    pool = np.full((pages, 2, page_size, kv_heads, head_dim), np.nan, dtype)
    shuffled = iter(rng.permutation(pages).tolist())
    tokens, indptrs, indices, lasts = [], [], [], []
    for level, of_level in zip(lengths, counts, strict=True):
        ids, states = [], []
        for length, count in zip(level, of_level, strict=True):
            k, v = (normal(rng, (length, kv_heads, head_dim), dtype) for _ in range(2))
            own = [next(shuffled) for _ in range(count)]
            for j in range(length):
                pool[own[j // page_size], :, j % page_size] = k[j], v[j]
            ids += own
            states.append((k, v))
        tokens.append(states)
        indptrs.append(np.concatenate([[0], np.cumsum(of_level)]).astype(np.int32))
        indices.append(np.array(ids, np.int32))
        lasts.append(np.array([(length - 1) % page_size + 1 if length else 0 for length in level], np.int32))
    q = normal(rng, (int(qo_indptr[-1][-1]), heads[0], head_dim), dtype)
    cache = pool if layout == "NHD" else np.ascontiguousarray(pool.swapaxes(2, 3))
    return Cascade(q, cache, layout, (qo_indptr, indptrs, indices, lasts), tokens, (*heads, head_dim, page_size))
