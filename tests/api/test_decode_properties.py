"""Hypothesis draws shapes, layouts, page tables, options and kinds of arrays; the oracle says what must come out.

420 cases for each pair of dtypes (support/properties.py scales that), the same ones in every run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from support.cases import Cache, CacheCase, build, normal
from support.compare import assert_close, assert_lse_close
from support.decoding import (
    LSE_TOLERANCE,
    O_TOLERANCE,
    PAIRS,
    csr,
    load_variants,
    oracle,
    paged_cache,
    plan_sizes,
    to_kind,
)
from support.kinds import WRITABLE, kind_of
from support.properties import examples

CASES = examples(420)


@dataclass(frozen=True)
class Drawn:
    """One case: how the cache is built, what is asked of it, and through which arrays and function."""

    case: CacheCase
    mode: str
    options: dict[str, Any]
    scales: dict[str, float | None]
    sinks: bool
    entry: str  # batch, graph or single
    q_kind: str
    cache_kind: str
    index_kind: str
    index_dtype: str
    spread: bool  # a cache that is not contiguous
    given_results: bool  # out= and lse=
    return_lse: bool


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None, *values))


@st.composite
def drawn_cases(draw: st.DrawFn, kv_dtype: str) -> Drawn:
    page_size = draw(st.sampled_from((1, 2, 3, 5, 16, 17, 64)))
    edge = st.builds(lambda pages, step: max(0, pages * page_size + step), st.integers(0, 2), st.integers(-1, 1))
    kv_heads, group = draw(st.sampled_from(((1, 1), (1, 5), (1, 16), (2, 2), (2, 7), (3, 3), (4, 1), (1, 9))))
    case = CacheCase(
        lengths=tuple(draw(st.lists(edge | st.integers(0, 40), max_size=4))),
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((8, 16, 40, 64, 128))),
        page_size=page_size,
        layout=draw(st.sampled_from(("NHD", "HND"))),
        rank=draw(st.sampled_from((4, 5))),
        dtype=kv_dtype,
        seed=draw(st.integers(0, 2**16)),
    )
    return Drawn(
        case=case,
        mode=draw(st.sampled_from(("NONE", "ROPE_LLAMA", "ALIBI"))),
        options={
            "window_left": draw(st.sampled_from((-1, -1, 0, 1, 4, 17, 1000))),
            "logits_soft_cap": draw(maybe(0.0, 1.5, 30.0)),
            "sm_scale": draw(maybe(0.05, 0.4)),
            "rope_scale": draw(maybe(1.0, 8.0)),
            "rope_theta": draw(maybe(1e4, 5e5)),
        },
        scales={name: draw(maybe(1.0, 0.5, 1.75)) for name in ("q_scale", "k_scale", "v_scale")},
        sinks=draw(st.booleans()),
        entry=draw(st.sampled_from(("batch", "batch", "graph", "single"))),
        q_kind=draw(st.sampled_from(WRITABLE)),
        cache_kind=draw(st.sampled_from(WRITABLE)),
        index_kind=draw(st.sampled_from(WRITABLE)),
        index_dtype=draw(st.sampled_from(("int32", "int64", "uint32"))),
        spread=draw(st.booleans()),
        given_results=draw(st.booleans()),
        return_lse=draw(st.booleans()),
    )


def spread_out(cache: Cache, kind: str) -> Any:
    """The cache as a strided part of larger blocks full of NaN: heads, slots and pages lie further apart."""

    def part(blocks: np.ndarray) -> Any:
        larger = np.full([size + 1 for size in blocks.shape[:-1]] + [blocks.shape[-1] + 8], np.nan, blocks.dtype)
        inner = (slice(1, None), slice(None, 2) if blocks.ndim == 5 else slice(1, None), slice(1, None), slice(1, None))
        inner = (*inner[: blocks.ndim - 1], slice(4, -4))
        larger[inner] = blocks
        return to_kind(larger, kind)[inner]

    k = part(cache.k_blocks)
    return k if cache.case.rank == 5 else (k, part(cache.v_blocks))


def decode(drawn: Drawn, cache: Cache, q: np.ndarray, sinks: np.ndarray | None) -> tuple[Any, Any]:
    """O and lse, or o and None."""
    case = cache.case
    query = to_kind(q, drawn.q_kind)
    # MAX buffers have no strides.
    pages = spread_out(cache, drawn.cache_kind) if drawn.spread and drawn.cache_kind != "max" else None
    table = [to_kind(array, drawn.index_kind) for array in csr(cache, drawn.index_dtype)]
    data_types = {"q_data_type": q.dtype.name, "kv_data_type": case.dtype}
    if drawn.entry == "graph":
        batch, most = len(case.lengths), len(cache.k_blocks)
        buffers = [np.full(size, -7, np.int32) for size in (batch + 1, most, batch)]
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            None, *(to_kind(buffer, drawn.index_kind) for buffer in buffers), kv_layout=case.layout
        )
    else:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, case.layout)
    wrapper.plan(*table, *plan_sizes(cache), pos_encoding_mode=drawn.mode, **drawn.options, **data_types)
    results = {}
    if drawn.given_results:
        results["out"] = to_kind(np.full(q.shape, np.nan, q.dtype), drawn.q_kind)
        results["lse"] = to_kind(np.full(q.shape[:2], np.nan, np.float32), drawn.q_kind)
    found = wrapper.run(
        query,
        paged_cache(cache, drawn.cache_kind) if pages is None else pages,
        **drawn.scales,
        return_lse=drawn.return_lse,
        sinks=sinks,
        **results,
    )
    o, lse = found if drawn.return_lse else (found, results.get("lse"))
    if drawn.given_results:
        assert o is results["out"]
        assert lse is results["lse"]
    return o, lse


def decode_singly(drawn: Drawn, cache: Cache, q: np.ndarray) -> tuple[Any, Any]:
    """The same by one call a request over its contiguous tokens."""
    outputs, sums = [np.zeros_like(q[:0])], [np.zeros(q[:0].shape[:2], np.float32)]
    for query, *tokens in zip(q, cache.keys, cache.values, strict=True):
        if cache.case.layout == "HND":
            tokens = [np.ascontiguousarray(array.swapaxes(0, 1)) for array in tokens]
        k, v = (to_kind(array, drawn.cache_kind) for array in tokens)
        o, lse = single_decode_with_kv_cache(
            to_kind(query, drawn.q_kind),
            k,
            v,
            cache.case.layout,
            drawn.mode,
            **drawn.scales,
            **drawn.options,
            return_lse=True,
        )
        assert kind_of(o) == kind_of(lse) == drawn.q_kind
        outputs.append(as_numpy(o, "o")[None])
        sums.append(as_numpy(lse, "lse")[None])
    return np.concatenate(outputs), np.concatenate(sums)


@pytest.mark.hypothesis  # as Hypothesis marks what it decorates itself
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS)
def test_drawn_cases_agree_with_the_oracle(q_dtype: str, kv_dtype: str) -> None:
    load_variants()
    count = 0

    @settings(max_examples=CASES, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(drawn_cases(kv_dtype))
    def agrees(drawn: Drawn) -> None:
        nonlocal count
        count += 1
        cache = build(drawn.case)
        rng = np.random.default_rng(drawn.case.seed + 1)
        q = normal(rng, cache.q.shape, q_dtype)
        sinks = normal(rng, q.shape[1:2], "float32") if drawn.sinks and drawn.entry != "single" else None
        if drawn.entry == "single":
            o, lse = decode_singly(drawn, cache, q)
        else:
            o, lse = decode(drawn, cache, q, sinks)
            assert kind_of(o) == drawn.q_kind
        expected_o, expected_lse = oracle(cache, q, drawn.mode, sinks=sinks, **drawn.scales, **drawn.options)
        assert_close(as_numpy(o, "o"), expected_o, rel=O_TOLERANCE[kv_dtype], what="o")
        if lse is not None:
            assert_lse_close(as_numpy(lse, "lse"), expected_lse, tol=LSE_TOLERANCE, what="lse")

    agrees()
    assert count >= CASES
