"""Hypothesis draws ragged batches, masks, layouts, options and kinds of arrays; the oracle says what must come out."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy
from paged_kv.attention import BatchAttention
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from support.cases import Cache, CacheCase, build, normal
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, csr, to_kind
from support.kinds import WRITABLE, kind_of
from support.prefilling import (
    PAIRS,
    causal_masks,
    expected,
    flat,
    full_masks,
    load_variants,
    offsets,
    packed,
    queries,
    random_masks,
)
from support.properties import examples

CASES = examples(250)

ENTRIES = ("paged", "paged", "paged graph", "ragged", "ragged graph", "single", "mixed")


@dataclass(frozen=True)
class Drawn:
    """One case: how the cache is built, what is asked of it, and through which arrays and function."""

    case: CacheCase
    q_lens: tuple[int, ...]
    head_dim_qk: int  # of K and V the wider has the case's
    head_dim_vo: int
    sight: str  # full, causal, mask or packed
    mode: str
    options: dict[str, Any]
    scales: dict[str, float | None]
    sinks: bool
    entry: str
    kind: str
    index_dtype: str
    given_results: bool
    lse_base: str
    lse_layout: str


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None, *values))


@st.composite
def drawn_cases(draw: st.DrawFn, kv_dtype: str) -> Drawn:
    page_size = draw(st.sampled_from((1, 5, 16, 64)))
    kv_heads, group = draw(st.sampled_from(((1, 1), (1, 3), (1, 16), (2, 2), (2, 7), (3, 5), (2, 8), (1, 6), (4, 4))))
    lengths = tuple(draw(st.lists(st.integers(0, 3 * page_size + 2) | st.integers(0, 90), max_size=4)))
    entry = draw(st.sampled_from(ENTRIES))
    mixed = entry == "mixed"
    head_dim_qk, head_dim_vo = draw(
        st.sampled_from(((8, 8), (64, 64), (128, 128), (64, 40), (40, 64), (128, 64), (192, 128), (16, 80)))
    )
    case = CacheCase(
        lengths=lengths,
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=max(head_dim_qk, head_dim_vo),
        page_size=page_size,
        layout=draw(st.sampled_from(("NHD", "HND"))),
        rank=4,
        dtype=kv_dtype,
        seed=draw(st.integers(0, 2**16)),
    )
    return Drawn(
        case=case,
        # A request may have more rows than tokens, or none.
        q_lens=tuple(draw(st.integers(0, length + 2) | st.just(1)) for length in lengths),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        sight=draw(st.sampled_from(("full", "causal") if mixed else ("full", "causal", "mask", "packed"))),
        mode="NONE" if mixed else draw(st.sampled_from(("NONE", "ROPE_LLAMA", "ALIBI"))),
        options={
            "window_left": -1 if mixed else draw(st.sampled_from((-1, -1, 0, 1, 4, 17, 1000))),
            "logits_soft_cap": draw(maybe(0.0, 1.5, 30.0)),
            "sm_scale": draw(maybe(0.05, 0.4)),
            "rope_scale": None if mixed else draw(maybe(1.0, 8.0)),
            "rope_theta": None if mixed else draw(maybe(1e4, 5e5)),
        },
        scales={name: draw(maybe(1.0, 0.5, 1.75)) for name in ("q_scale", "k_scale", "v_scale")},
        sinks=draw(st.booleans()),
        entry=entry,
        kind=draw(st.sampled_from(WRITABLE)),
        index_dtype=draw(st.sampled_from(("int32", "int64", "uint32"))),
        given_results=draw(st.booleans()),
        lse_base="log2" if mixed else draw(st.sampled_from(("log2", "ln"))),
        lse_layout="NH" if mixed else draw(st.sampled_from(("NH", "HN"))),
    )


def pages_of(drawn: Drawn, cache: Cache) -> tuple[Any, Any]:
    """K and V of the wanted widths: heads of the narrower are parts of wider ones."""
    k = to_kind(cache.k_blocks, "numpy" if drawn.kind == "max" else drawn.kind)
    v = to_kind(cache.v_blocks, "numpy" if drawn.kind == "max" else drawn.kind)
    return k[..., : drawn.head_dim_qk], v[..., : drawn.head_dim_vo]


def tokens_of(drawn: Drawn, cache: Cache) -> tuple[Any, Any]:
    """The same tokens, contiguous, with more behind them that are no request's."""
    case = cache.case
    rest = np.full((3, case.num_kv_heads, case.head_dim), np.nan, case.dtype)
    k, v = (np.concatenate([*parts, rest]) for parts in (cache.keys, cache.values))
    if case.layout == "HND":
        k, v = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (k, v))
    kind = "numpy" if drawn.kind == "max" else drawn.kind
    return to_kind(k, kind)[..., : drawn.head_dim_qk], to_kind(v, kind)[..., : drawn.head_dim_vo]


def run(drawn: Drawn, cache: Cache, q: np.ndarray, masks: list[np.ndarray], sinks: np.ndarray | None) -> Any:
    """O and lse of one of the wrappers."""
    case = cache.case
    paged = not drawn.entry.startswith("ragged")
    lens = [int(length) for length in case.lengths]
    arrays = csr(cache, drawn.index_dtype) if paged else (offsets(lens).astype(drawn.index_dtype),)
    qo_indptr = offsets(drawn.q_lens).astype(drawn.index_dtype)
    table = [to_kind(array, drawn.kind) for array in (qo_indptr, *arrays)]
    sizes = (case.num_q_heads, case.num_kv_heads, drawn.head_dim_qk, case.page_size)[: 4 if paged else 3]
    dtypes = {"q_data_type": q.dtype.name, "kv_data_type": case.dtype}
    common: dict[str, Any] = {"causal": drawn.sight == "causal"} | dtypes
    results: dict[str, Any] = {}
    if drawn.given_results:
        shape = (*q.shape[:2], drawn.head_dim_vo)
        lse_shape = shape[:2] if drawn.lse_layout == "NH" else shape[1::-1]
        results["out"] = to_kind(np.full(shape, np.nan, q.dtype), drawn.kind)
        results["lse"] = to_kind(np.full(lse_shape, np.nan, np.float32), drawn.kind)
    query = to_kind(q, drawn.kind)
    if drawn.entry == "mixed":
        mixed = BatchAttention(case.layout, device="cpu")
        lengths = to_kind(cache.lengths.astype(drawn.index_dtype), drawn.kind)
        options = {name: drawn.options[name] for name in ("sm_scale", "logits_soft_cap")}
        mixed.plan(*table[:3], lengths, *sizes[:3], drawn.head_dim_vo, case.page_size, **options, **common)
        scales = {name: drawn.scales[name] for name in ("k_scale", "v_scale")}
        return mixed.run(query, pages_of(drawn, cache), **scales, **results)
    if drawn.sight in ("mask", "packed"):
        common |= {"custom_mask": flat(masks)} if drawn.sight == "mask" else {"packed_custom_mask": packed(masks)}
        common["causal"] = True  # the mask counts
    kind: Any = BatchPrefillWithPagedKVCacheWrapper if paged else BatchPrefillWithRaggedKVCacheWrapper
    if "graph" in drawn.entry:
        longer = [len(array) + 3 * (i == 2) for i, array in enumerate((qo_indptr, *arrays))]
        buffers = [to_kind(np.full(size, -7, np.int32), drawn.kind) for size in longer]
        mask_buffers = [np.zeros(len(packed(masks)) + 9, np.uint8), np.full(len(qo_indptr), -7, np.int32)]
        buffers += [to_kind(buffer, drawn.kind) for buffer in mask_buffers]
        wrapper = kind(None, case.layout, True, *buffers)
    else:
        wrapper = kind(None, case.layout)
    wrapper.plan(*table, *sizes, head_dim_vo=drawn.head_dim_vo, pos_encoding_mode=drawn.mode, **drawn.options, **common)
    results |= {"return_lse": True, "lse_base": drawn.lse_base, "lse_layout": drawn.lse_layout}
    if paged:
        return wrapper.run(query, pages_of(drawn, cache), **drawn.scales, sinks=sinks, **results)
    return wrapper.run(query, *tokens_of(drawn, cache), **drawn.scales, **results)


def run_singly(drawn: Drawn, cache: Cache, q: np.ndarray, masks: list[np.ndarray]) -> tuple[Any, Any]:
    """The same by one call a request over its contiguous tokens."""
    begins = offsets(drawn.q_lens)
    outputs = [np.zeros((0, q.shape[1], drawn.head_dim_vo), q.dtype)]
    sums = [np.zeros((0, q.shape[1]), np.float32)]
    kind = "numpy" if drawn.kind == "max" else drawn.kind
    for b, mask in enumerate(masks):
        tokens = [cache.keys[b][..., : drawn.head_dim_qk], cache.values[b][..., : drawn.head_dim_vo]]
        if cache.case.layout == "HND":
            tokens = [array.swapaxes(0, 1) for array in tokens]
        sight: dict[str, Any] = {"causal": drawn.sight == "causal"}
        if drawn.sight == "mask":
            sight = {"custom_mask": mask}
        if drawn.sight == "packed":
            sight = {"packed_custom_mask": packed([mask])}
        o, lse = single_prefill_with_kv_cache(
            to_kind(q[begins[b] : begins[b + 1]], kind),
            *(to_kind(array, kind) for array in tokens),
            drawn.scales["q_scale"],
            k_scale=drawn.scales["k_scale"],
            v_scale=drawn.scales["v_scale"],
            kv_layout=cache.case.layout,
            pos_encoding_mode=drawn.mode,
            **sight,
            **drawn.options,
            return_lse=True,
        )
        assert kind_of(o) == kind_of(lse) == kind
        outputs.append(as_numpy(o, "o"))
        sums.append(as_numpy(lse, "lse"))
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
        q = np.ascontiguousarray(queries(cache, drawn.q_lens, q_dtype)[..., : drawn.head_dim_qk])
        rng = np.random.default_rng(drawn.case.seed + 2)
        lens = drawn.q_lens, drawn.case.lengths
        made = {"full": full_masks, "causal": causal_masks}.get(drawn.sight)
        masks = made(*lens) if made else random_masks(rng, *lens)
        takes_sinks = drawn.sinks and drawn.entry.startswith("paged")
        sinks = normal(rng, q.shape[1:2], "float32") if takes_sinks else None
        scales = dict(drawn.scales) | ({"q_scale": None} if drawn.entry == "mixed" else {})
        widths = {"head_dim_vo": drawn.head_dim_vo, "pos_encoding_mode": drawn.mode}
        if sinks is not None:  # not far above all scores: o would be a subnormal number of float16
            _, sums = expected(cache, q, masks, **widths, sinks=None, **scales, **drawn.options)
            sinks += np.float32(np.log(2) * sums[np.isfinite(sums)].min(initial=0))
        if drawn.entry == "single":
            o, lse = run_singly(drawn, cache, q, masks)
        else:
            o, lse = run(drawn, cache, q, masks, sinks)
            assert kind_of(o) == kind_of(lse) == drawn.kind
        wanted, sums = expected(cache, q, masks, **widths, sinks=sinks, **scales, **drawn.options)
        assert_close(as_numpy(o, "o"), wanted, rel=O_TOLERANCE[kv_dtype], what="o")
        found = as_numpy(lse, "lse")
        if drawn.entry != "single":
            found = found if drawn.lse_layout == "NH" else found.T
            sums = sums if drawn.lse_base == "log2" else sums * np.log(2)
        assert_lse_close(found, sums, tol=LSE_TOLERANCE, what="lse")

    agrees()
    assert count >= CASES
