"""Hypothesis draws batches, masks, layouts, options and kinds of arrays for every wrapper but those that merge states
and MLA's; the oracle says what must come out. The same cases in every run.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv.arrays import devices
from paged_kv.arrays.host import as_numpy
from paged_kv.attention import BatchAttention
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from support import harness
from support.cases import Cache, CacheCase, build, csr, normal
from support.codes import quantised_cache, widened_pages
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, to_kind
from support.decoding import PAIRS as DECODE_PAIRS
from support.harness import CODE_PAIRS
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
from support.stand_in import STAND_IN

DECODE = ("decode", "decode", "decode graph", "single decode")
PREFILL = ("paged", "paged", "paged graph", "ragged", "ragged graph", "single", "mixed")
SCORE_ROUNDING = 2.0**-22
"""The error of a float32 score, in base 2: half a unit in the last place for the product, the scale, and the base."""


@dataclass(frozen=True)
class Drawn:
    """One case: how the cache is built, what is asked of it, and through which arrays and function."""

    case: CacheCase
    kv_dtype: str  # the case's, or codes that its numbers become
    q_lens: tuple[int, ...]
    head_dim_qk: int  # of K and V the wider has the case's
    head_dim_vo: int
    seen: str  # full, causal, mask or packed
    mode: str
    options: dict[str, Any]
    scales: dict[str, float | None]
    sinks: bool
    entry: str
    q_kind: str
    cache_kind: str
    index_kind: str
    index_dtype: str
    spread: bool  # a cache that is not contiguous
    return_lse: bool  # of a decode
    given_results: bool
    lse_base: str
    lse_layout: str


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None, *values))


@st.composite
def drawn_cases(draw: st.DrawFn, entries: tuple[str, ...], pair: tuple[str, str]) -> Drawn:
    codes = pair[1] in CODE_DTYPES
    page_size = draw(st.sampled_from((1, 2, 3, 5, 16, 17, 64, 128)))
    groups = ((1, 1), (1, 3), (1, 16), (2, 2), (2, 7), (3, 5), (2, 8), (1, 6), (4, 4), (3, 3), (4, 1), (1, 9))
    kv_heads, group = draw(st.sampled_from(groups))
    edge = st.builds(lambda pages, step: max(0, pages * page_size + step), st.integers(0, 3), st.integers(-1, 2))
    lengths = tuple(draw(st.lists(edge | st.integers(0, 90), max_size=4)))
    entry = draw(st.sampled_from(entries))
    mixed, decodes = entry == "mixed", entry in DECODE
    widths = ((8, 8), (64, 64), (128, 128), (64, 40), (40, 64), (128, 64), (192, 128), (16, 80))
    equal = ((8, 8), (16, 16), (40, 40), (64, 64), (128, 128))[1 if codes else 0 :]
    head_dim_qk, head_dim_vo = draw(st.sampled_from(equal if decodes or codes else widths))
    case = CacheCase(
        lengths=lengths,
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=max(head_dim_qk, head_dim_vo),
        page_size=page_size,
        layout=draw(st.sampled_from(("NHD", "HND"))),
        rank=draw(st.sampled_from((4, 5))) if head_dim_qk == head_dim_vo else 4,
        dtype=pair[0] if codes else pair[1],
        seed=draw(st.integers(0, 2**16)),
    )
    return Drawn(
        case=case,
        kv_dtype=pair[1],
        # A request may have more rows than tokens, or none.
        q_lens=tuple(1 if decodes else draw(st.integers(0, length + 20) | st.integers(0, 2)) for length in lengths),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        seen="full"
        if decodes
        else draw(st.sampled_from(("full", "causal") if mixed else ("full", "causal", "mask", "packed"))),
        mode="NONE"
        if mixed
        else draw(st.sampled_from(("NONE", "ALIBI") if codes else ("NONE", "ROPE_LLAMA", "ALIBI"))),
        options={
            "window_left": -1 if mixed else draw(st.sampled_from((-1, -1, 0, 1, 4, 17, 1000))),
            "logits_soft_cap": draw(maybe(0.0, 1.5, 30.0)),
            "sm_scale": draw(maybe(*(factor * head_dim_qk**-0.5 for factor in (0.5, 2.0)))),
            "rope_scale": None if mixed else draw(maybe(1.0, 8.0)),
            "rope_theta": None if mixed else draw(maybe(1e4, 5e5)),
        },
        scales={name: draw(maybe(1.0, 0.5, 1.75)) for name in ("q_scale", "k_scale", "v_scale")},
        sinks=draw(st.booleans()),
        entry=entry,
        q_kind=draw(st.sampled_from(WRITABLE)),
        cache_kind=draw(st.sampled_from(WRITABLE)),
        index_kind=draw(st.sampled_from(WRITABLE)),
        index_dtype=draw(st.sampled_from(("int32", "int64", "uint32"))),
        spread=draw(st.booleans()),
        return_lse=not decodes or draw(st.booleans()),
        given_results=draw(st.booleans()),
        lse_base="log2" if mixed or decodes else draw(st.sampled_from(("log2", "ln"))),
        lse_layout="NH" if mixed or decodes else draw(st.sampled_from(("NH", "HN"))),
    )


def pages_of(drawn: Drawn, cache: Cache) -> Any:
    """K and V of the wanted widths: heads of the narrower are parts of wider ones."""
    if drawn.head_dim_qk == drawn.head_dim_vo and (not drawn.spread or drawn.cache_kind == "max"):
        k, v = (to_kind(blocks, drawn.cache_kind) for blocks in (cache.k_blocks, cache.v_blocks))
        return k if cache.case.rank == 5 else (k, v)
    kind = "numpy" if drawn.cache_kind == "max" else drawn.cache_kind  # MAX buffers have no strides
    k = spread_out(cache.k_blocks, kind)
    if cache.case.rank == 5:
        return k
    if drawn.kv_dtype in CODE_DTYPES:
        return k, spread_out(cache.v_blocks, kind)
    return k[..., : drawn.head_dim_qk], spread_out(cache.v_blocks, kind)[..., : drawn.head_dim_vo]


def spread_out(blocks: np.ndarray, kind: str) -> Any:
    """Blocks as a strided part of larger ones full of NaN: heads, slots and pages lie further apart."""
    poison = np.array(-1).astype(blocks.dtype) if blocks.dtype.kind in "iu" else np.nan
    larger = np.full([size + 1 for size in blocks.shape[:-1]] + [blocks.shape[-1] + 8], poison, blocks.dtype)
    inner = (slice(1, None), *[slice(None, 2)] * (blocks.ndim == 5), slice(1, None), slice(1, None), slice(4, -4))
    larger[inner] = blocks
    return to_kind(larger, kind)[inner]


def tokens_of(drawn: Drawn, cache: Cache) -> tuple[Any, Any]:
    """The same tokens, contiguous, with more behind them that are no request's."""
    case = cache.case
    rest = np.full((3, case.num_kv_heads, case.head_dim), np.nan, case.dtype)
    k, v = (np.concatenate([*parts, rest]) for parts in (cache.keys, cache.values))
    if case.layout == "HND":
        k, v = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (k, v))
    kind = "numpy" if drawn.cache_kind == "max" else drawn.cache_kind
    return to_kind(k, kind)[..., : drawn.head_dim_qk], to_kind(v, kind)[..., : drawn.head_dim_vo]


def run(drawn: Drawn, cache: Cache, q: np.ndarray, masks: list[np.ndarray], sinks: np.ndarray | None) -> Any:
    """O and lse of one of the wrappers."""
    case = cache.case
    paged = not drawn.entry.startswith("ragged")
    lens = [int(length) for length in case.lengths]
    arrays = csr(cache, drawn.index_dtype) if paged else (offsets(lens).astype(drawn.index_dtype),)
    qo_indptr = offsets(drawn.q_lens).astype(drawn.index_dtype)
    table = [to_kind(array, drawn.index_kind) for array in (qo_indptr, *arrays)]
    sizes = (case.num_q_heads, case.num_kv_heads, drawn.head_dim_qk, case.page_size)[: 4 if paged else 3]
    dtypes = {"q_data_type": q.dtype.name, "kv_data_type": drawn.kv_dtype}
    common: dict[str, Any] = {"causal": drawn.seen == "causal"} | dtypes
    results: dict[str, Any] = {}
    if drawn.given_results:
        shape = (*q.shape[:2], drawn.head_dim_vo)
        lse_shape = shape[:2] if drawn.lse_layout == "NH" else shape[1::-1]
        results["out"] = to_kind(np.full(shape, np.nan, q.dtype), drawn.q_kind)
        results["lse"] = to_kind(np.full(lse_shape, np.nan, np.float32), drawn.q_kind)
    query = to_kind(q, drawn.q_kind)
    if drawn.entry in DECODE:
        buffers = [to_kind(np.full(len(array), -7, np.int32), drawn.index_kind) for array in arrays]
        graph = (True, False, *buffers) if "graph" in drawn.entry else ()
        decode = BatchDecodeWithPagedKVCacheWrapper(None, case.layout, *graph)
        decode.plan(*table[1:], *sizes, pos_encoding_mode=drawn.mode, **drawn.options, **dtypes)
        pages = pages_of(drawn, cache)
        found = decode.run(query, pages, **drawn.scales, return_lse=drawn.return_lse, sinks=sinks, **results)
        o, lse = found if drawn.return_lse else (found, results.get("lse"))
        assert not results or (o is results["out"] and lse is results["lse"])
        return o, lse
    if drawn.entry == "mixed":
        mixed = BatchAttention(case.layout, device="cpu")
        lengths = to_kind(cache.lengths.astype(drawn.index_dtype), drawn.index_kind)
        options = {name: drawn.options[name] for name in ("sm_scale", "logits_soft_cap")}
        mixed.plan(*table[:3], lengths, *sizes[:3], drawn.head_dim_vo, case.page_size, **options, **common)
        scales = {name: drawn.scales[name] for name in ("k_scale", "v_scale")}
        return mixed.run(query, pages_of(drawn, cache), **scales, **results)
    if drawn.seen in ("mask", "packed"):
        common |= {"custom_mask": flat(masks)} if drawn.seen == "mask" else {"packed_custom_mask": packed(masks)}
        common["causal"] = True  # the mask counts
    kind: Any = BatchPrefillWithPagedKVCacheWrapper if paged else BatchPrefillWithRaggedKVCacheWrapper
    if "graph" in drawn.entry:
        longer = [len(array) + 3 * (i == 2) for i, array in enumerate((qo_indptr, *arrays))]
        buffers = [to_kind(np.full(size, -7, np.int32), drawn.index_kind) for size in longer]
        mask_buffers = [np.zeros(len(packed(masks)) + 9, np.uint8), np.full(len(qo_indptr), -7, np.int32)]
        buffers += [to_kind(buffer, drawn.index_kind) for buffer in mask_buffers]
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
    kind = "numpy" if drawn.cache_kind == "max" else drawn.cache_kind
    for b, mask in enumerate(masks):
        tokens = [cache.keys[b][..., : drawn.head_dim_qk], cache.values[b][..., : drawn.head_dim_vo]]
        if cache.case.layout == "HND":
            tokens = [array.swapaxes(0, 1) for array in tokens]
        seen: dict[str, Any] = {"causal": drawn.seen == "causal"}
        if drawn.seen == "mask":
            seen = {"custom_mask": mask}
        if drawn.seen == "packed":
            seen = {"packed_custom_mask": packed([mask])}
        k, v = (to_kind(array, kind) for array in tokens)
        if drawn.entry in DECODE:
            given = {**drawn.scales, **drawn.options, "return_lse": True}
            one = to_kind(q[b], drawn.q_kind)
            o, lse = single_decode_with_kv_cache(one, k, v, cache.case.layout, drawn.mode, **given)
            assert kind_of(o) == kind_of(lse) == drawn.q_kind
            outputs.append(as_numpy(o, "o")[None])
            sums.append(as_numpy(lse, "lse")[None])
            continue
        o, lse = single_prefill_with_kv_cache(
            to_kind(q[begins[b] : begins[b + 1]], kind),
            *(k, v),
            drawn.scales["q_scale"],
            k_scale=drawn.scales["k_scale"],
            v_scale=drawn.scales["v_scale"],
            kv_layout=cache.case.layout,
            pos_encoding_mode=drawn.mode,
            **seen,
            **drawn.options,
            return_lse=True,
        )
        assert kind_of(o) == kind_of(lse) == kind
        outputs.append(as_numpy(o, "o"))
        sums.append(as_numpy(lse, "lse"))
    return np.concatenate(outputs), np.concatenate(sums)


@pytest.mark.hypothesis  # as Hypothesis marks what it decorates itself
@pytest.mark.parametrize(
    ("entries", "pair"),
    [(DECODE, pair) for pair in DECODE_PAIRS] + [(PREFILL, pair) for pair in PAIRS]
    + [(DECODE[:3], CODE_PAIRS[-1]), (("paged", "paged", "paged graph", "mixed"), CODE_PAIRS[-1])],
    ids=lambda value: value[0] if len(value) > 2 else " over ".join(value),
)  # fmt: skip
def test_drawn_cases_agree_with_the_oracle(entries: tuple[str, ...], pair: tuple[str, str]) -> None:
    check_drawn(entries, pair, 420 if entries == DECODE else 250)


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.parametrize("pair", [("float32", "float32"), ("bfloat16", "float8_e4m3fn")], ids=" over ".join)
@pytest.mark.parametrize("entries", [DECODE, PREFILL], ids=lambda value: value[0])
@pytest.mark.usefixtures("stand_in")
def test_tensors_go_the_way_of_a_gpus(entries: tuple[str, ...], pair: tuple[str, str]) -> None:
    """Without one: torch's on the CPU stand in for those in its memory. What only a GPU can show is in tests/gpu."""
    assert devices.device_of(q=torch.zeros(1)) is STAND_IN
    check_drawn(entries, pair, 100, all_torch=True)


def check_drawn(entries: tuple[str, ...], pair: tuple[str, str], number: int, *, all_torch: bool = False) -> None:
    load_variants()
    if pair[1] in CODE_DTYPES:
        harness.code_libraries()
    count, q_dtype = 0, pair[0]
    cases = examples(number)

    @settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(drawn_cases(entries, pair))
    def agrees(drawn: Drawn) -> None:
        nonlocal count
        count += 1
        if all_torch:
            drawn = replace(drawn, q_kind="torch", cache_kind="torch")
        cache = truth = build(drawn.case)
        if pair[1] in CODE_DTYPES:
            cache = quantised_cache(drawn.case, pair[1])
            k_blocks, v_blocks, _ = widened_pages(cache)
            truth = replace(cache, k_blocks=k_blocks, v_blocks=v_blocks)
        q = np.ascontiguousarray(queries(cache, drawn.q_lens, q_dtype)[..., : drawn.head_dim_qk])
        rng = np.random.default_rng(drawn.case.seed + 2)
        lens = drawn.q_lens, drawn.case.lengths
        made = {"full": full_masks, "causal": causal_masks}.get(drawn.seen)
        masks = made(*lens) if made else random_masks(rng, *lens)
        takes_sinks = drawn.sinks and drawn.entry.startswith(("paged", "decode"))
        sinks = normal(rng, q.shape[1:2], "float32") if takes_sinks else None
        scales = dict(drawn.scales) | ({"q_scale": None} if drawn.entry == "mixed" else {})
        widths = {"head_dim_vo": drawn.head_dim_vo, "pos_encoding_mode": drawn.mode}
        if sinks is not None:  # not far above all scores: o would be a subnormal number of float16
            _, sums = expected(truth, q, masks, **widths, sinks=None, **scales, **drawn.options)
            sinks += np.float32(np.log(2) * sums[np.isfinite(sums)].min(initial=0))
        if "single" in drawn.entry:
            o, lse = run_singly(drawn, cache, q, masks)
        else:
            o, lse = run(drawn, cache, q, masks, to_kind(sinks, "torch") if all_torch and takes_sinks else sinks)
            assert kind_of(o) == drawn.q_kind
            assert lse is None or kind_of(lse) == drawn.q_kind
        wanted, sums = expected(truth, q, masks, **widths, sinks=sinks, **scales, **drawn.options)
        # Weights are as exact as scores, which are float32: those above 40 are rounded by more than the tolerance.
        tolerance = np.maximum(
            O_TOLERANCE[drawn.case.dtype], SCORE_ROUNDING * np.where(np.isfinite(sums), np.abs(sums), 0)
        )
        assert_close(as_numpy(o, "o"), wanted, rel=tolerance, what="o")
        if lse is None:
            return
        found = as_numpy(lse, "lse")
        if "single" not in drawn.entry:
            found = found if drawn.lse_layout == "NH" else found.T
            sums = sums if drawn.lse_base == "log2" else sums * np.log(2)
        assert_lse_close(found, sums, tol=LSE_TOLERANCE, what="lse")

    agrees()
    assert count >= cases
