"""Common parts of the prefill tests: the compiled variants, ragged queries over a built cache, and what must come out.

Letters in shapes: B requests, R query rows, Hq query heads, D head dimension (Dv: V's).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv import reference
from support import harness
from support.cases import Cache, normal
from support.compare import assert_close, assert_lse_close
from support.decoding import oracle_options

PAIRS = harness.MASKED_PAIRS
"""The dtypes of queries and caches."""


def load_variants() -> None:
    """Loads every variant that these tests execute, compiled together where the disk has them not."""
    harness.libraries()
    harness.masked_libraries()


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """`[B + 1]` int32, from 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def queries(cache: Cache, q_lens: Sequence[int], dtype: str | None = None) -> np.ndarray:
    """Standard normal `[R, Hq, D]`."""
    shape = (sum(q_lens), cache.case.num_q_heads, cache.case.head_dim)
    return normal(np.random.default_rng(cache.case.seed + 1), shape, dtype or cache.case.dtype)


def causal_masks(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[np.ndarray]:
    """For each request `[q_len, kv_len]` bool: rows are the last tokens, and see those up to themselves."""
    return [np.tril(np.ones((q, kv), bool), kv - q) for q, kv in zip(q_lens, kv_lens, strict=True)]


def full_masks(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[np.ndarray]:
    """For each request `[q_len, kv_len]` bool, all true."""
    return [np.ones((q, kv), bool) for q, kv in zip(q_lens, kv_lens, strict=True)]


def random_masks(rng: np.random.Generator, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[np.ndarray]:
    """For each request `[q_len, kv_len]` bool, among them rows that see nothing, and rows that see all."""
    masks = []
    for q, kv in zip(q_lens, kv_lens, strict=True):
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], size=(q, 1))
        masks.append(rng.random((q, kv)) < share)
    return masks


def flat(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The masks as `plan` takes them."""
    return np.concatenate([np.zeros(0, bool), *(mask.reshape(-1) for mask in masks)])


def packed(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The masks as bytes, each request's from a new byte on."""
    parts = [np.packbits(mask.reshape(-1), bitorder="little") for mask in masks]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def expected(
    cache: Cache,
    q: np.ndarray,
    masks: Sequence[np.ndarray],
    *,
    head_dim_vo: int | None = None,
    pos_encoding_mode: str = "NONE",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of the oracle, options as FlashInfer names them, None for its defaults.

    Of wider heads in the cache, the first D of K and the first `head_dim_vo` of V count. Each row looks at all its
    request's tokens through its mask, whatever the call under test does with them.
    """
    options = oracle_options(q.shape[1], pos_encoding_mode, **options)
    shapes = [mask.shape for mask in masks]
    rows = [(b, kv, kv - n + i, i * kv) for b, (n, kv) in enumerate(shapes) for i in range(n)]
    batch, lengths, positions, in_request = np.array(rows, np.int64).reshape(-1, 4).T
    starts = 8 * offsets([-(-mask.size // 8) for mask in masks]).astype(np.int64)
    row_masks = {
        "row_positions": positions.astype(np.int32),
        "mask": packed(masks),
        "mask_starts": starts[batch] + in_request,
    }
    k_blocks, v_blocks, table = cache.pages
    k_blocks, v_blocks = k_blocks[..., : q.shape[2]], v_blocks[..., :head_dim_vo]
    row_arguments = (batch.astype(np.int32), lengths.astype(np.int32))
    return reference.masked_attention(
        q, k_blocks, v_blocks, table, *row_arguments, **row_masks, **cache.storage, **options
    )


def assert_prefills(
    cache: Cache, q: np.ndarray, found: tuple[Any, Any], masks: Sequence[np.ndarray], **options: Any
) -> None:
    """O and lse are the oracle's for a float32 case."""
    o, lse = expected(cache, q, masks, **options)
    assert_close(found[0], o, rel=1e-5, what="o")
    assert_lse_close(found[1], lse, tol=1e-5, what="lse")
