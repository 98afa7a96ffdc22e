"""Small grids that still try every two values of two axes together, and what the op tests make of their settings."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from support.cases import Cache, CacheCase, edge_lengths, ragged_lengths

LENGTHS = ("edges", "ragged 2", "ragged 3", "ragged 4")
"""The batches that hold tokens: `edge_lengths`, and `ragged_lengths` by number."""


def all_pairs(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Settings of all axes, such that any two values of two different axes meet in at least one of them.

    Greedy: each setting starts from a pair that has not met yet, and the other axes take, in random order, the value
    that meets most new ones. The same seed always gives the same list.
    """
    rng = random.Random(seed)
    names = sorted(axes)
    unmet = {
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in range(len(axes[a])) for y in range(len(axes[b]))
    }
    settings = []
    while unmet:
        chosen = dict(min(unmet))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                new_pairs = [
                    sum(_pair((name, value), other) in unmet for other in chosen.items())
                    for value in range(len(axes[name]))
                ]
                chosen[name] = rng.choice([x for x, count in enumerate(new_pairs) if count == max(new_pairs)])
        unmet -= set(combinations(sorted(chosen.items()), 2))
        settings.append({name: axes[name][chosen[name]] for name in names})
    return settings


def _pair(a: tuple[str, int], b: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (a, b) if a < b else (b, a)


def case_of(setting: Mapping[str, Any]) -> CacheCase:
    """The cache of a setting of `dtype, storage, page_size, lengths, num_kv_heads, group, head_dim`."""
    rank, layout = setting["storage"]
    page_size, lengths = setting["page_size"], setting["lengths"]
    return CacheCase(
        lengths=edge_lengths(page_size) if lengths == "edges" else ragged_lengths(page_size)[int(lengths[-1])],
        num_q_heads=setting.get("group", 1) * setting["num_kv_heads"],
        num_kv_heads=setting["num_kv_heads"],
        head_dim=setting["head_dim"],
        page_size=page_size,
        rank=rank,
        layout=layout,
        dtype=setting["dtype"],
    )


def setting_id(setting: Mapping[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in setting.values())


def tokens_of(cache: Cache) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """K, V `[N, Hk, D]`, batch indices and positions `[N]` int32 of all tokens, request after request."""
    case = cache.case
    none = np.zeros((0, case.num_kv_heads, case.head_dim), case.dtype)
    batch = np.repeat(np.arange(len(case.lengths)), case.lengths)
    positions = np.concatenate([np.arange(0), *(np.arange(length) for length in case.lengths)])
    return (
        np.concatenate([none, *cache.keys]),
        np.concatenate([none, *cache.values]),
        batch.astype(np.int32),
        positions.astype(np.int32),
    )
