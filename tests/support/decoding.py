"""Common parts of the decode tests: the compiled variants, arrays of every kind, and a case as the API takes it.

Every test module that executes attention imports this one: its variants are those of `harness.py`, compiled in one go.
"""

from typing import Any

import numpy as np

from paged_kv import reference
from paged_kv.arrays.host import as_numpy, like, sample_array, to_buffer
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper
from support import harness
from support.cases import Cache, csr
from support.compare import assert_close, assert_lse_close
from support.kinds import library

PAIRS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
)
"""The dtypes of queries and caches that the suite compiles."""

O_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 2e-2, "float8_e5m2": 2e-2}
"""By the cache's dtype."""
LSE_TOLERANCE = 1e-5


def load_variants() -> None:
    """Loads every variant that these tests execute, compiled together where the disk has them not."""
    assert set(PAIRS) <= set(harness.PAIRS)
    harness.libraries()


def to_kind(array: np.ndarray, kind: str) -> Any:
    """The array as one of `kinds.PLACED`, over the same memory."""
    return to_buffer(array) if kind == "max" else like(sample_array(library(kind)), array)


def oracle_options(heads: int, pos_encoding_mode: str, **options: Any) -> dict[str, Any]:
    """Return what the oracle calls FlashInfer's options; None for its defaults."""
    theta, scale = options.pop("rope_theta", None), options.pop("rope_scale", None)
    if pos_encoding_mode == "ROPE_LLAMA":
        options |= {"rope_theta": 1e4 if theta is None else theta, "rope_scale": 1.0 if scale is None else scale}
    if pos_encoding_mode == "ALIBI":
        options["alibi_slopes"] = reference.alibi_slopes(heads)
    return {name: value for name, value in options.items() if value is not None}


def plan_sizes(cache: Cache) -> tuple[int, int, int, int]:
    """num_qo_heads, num_kv_heads, head_dim, page_size: the arguments of `plan` after the page table."""
    case = cache.case
    return case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size


def paged_cache(cache: Cache, kind: str = "numpy") -> Any:
    """The blocks as `run` takes them."""
    k, v = (to_kind(blocks, kind) for blocks in (cache.k_blocks, cache.v_blocks))
    return (k, v) if cache.case.rank == 4 else k


def oracle(
    cache: Cache, q: np.ndarray, pos_encoding_mode: str = "NONE", **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of `reference.attention`, options as FlashInfer names them and with its defaults."""
    options = oracle_options(q.shape[1], pos_encoding_mode, **options)
    return reference.attention(q, *cache.pages, *cache.decode_rows, **cache.storage, **options)


def planned(cache: Cache, **options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    """A wrapper that has planned a float32 or bfloat16 case."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, cache.case.layout)
    wrapper.plan(*csr(cache), *plan_sizes(cache), **{"q_data_type": cache.case.dtype} | options)
    return wrapper


def assert_decodes(found: tuple[Any, Any], cache: Cache, *oracle_arguments: Any, **options: Any) -> None:
    """O and lse are the oracle's for the queries of a float32 case."""
    expected = oracle(cache, cache.q, *oracle_arguments, **options)
    assert_close(as_numpy(found[0], "o"), expected[0], rel=1e-5, what="o")
    assert_lse_close(as_numpy(found[1], "lse"), expected[1], tol=1e-5, what="lse")
