"""The positions of rows, in the wrappers that test_drawn.py leaves out: positions are absolute, and negative where a
request has more rows than tokens.

One flat context a request, in float64, is the truth for all: row i of n over L tokens stands at `L - n + i`. The tokens
of a cascade are cut out of the same contexts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv import cascade, prefill, reference
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import trtllm_batch_decode_with_kv_cache
from paged_kv.mla import BatchMLAPagedAttentionWrapper
from support.cases import SPARE_PAGES, normal
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE
from support.prefilling import offsets
from support.properties import examples

pytestmark = pytest.mark.usefixtures("masked_variants", "latent_variants")

Tokens = tuple[np.ndarray, np.ndarray]
Found = tuple[Any, Any]


@dataclass(frozen=True)
class Flat:
    """Requests whose contexts begin with the same `shared` tokens."""

    q: np.ndarray
    """`[R, Hq, D]`"""
    counts: list[int]
    """`[B]`, rows of each request."""
    tokens: list[Tokens]
    """`[B]`, K and V `[L, Hk, D]` of each."""
    shared: int
    page_size: int
    causal: bool
    mode: str
    options: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k, _ in self.tokens]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hq, Hk and D."""
        return self.q.shape[1], self.tokens[0][0].shape[1], self.q.shape[2]

    @property
    def dtypes(self) -> dict[str, str]:
        return {"q_data_type": self.q.dtype.name, "kv_data_type": self.tokens[0][0].dtype.name}

    def part(self, begin: int, end: int | None) -> list[Tokens]:
        return [(k[begin:end], v[begin:end]) for k, v in self.tokens]

    def paged(self, *parts: list[Tokens]) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """One NHD cache of shuffled pages with the tokens of all parts, and each part's three index arrays."""
        size, used = self.page_size, [[-(-len(k) // self.page_size) for k, _ in part] for part in parts]
        pages = sum(map(sum, used)) + SPARE_PAGES
        k = self.tokens[0][0]
        cache = np.full((pages, 2, size, *k.shape[1:]), np.nan, k.dtype)
        ids = iter(np.random.default_rng(pages).permutation(pages).astype(np.int32))
        tables = []
        for part, counts in zip(parts, used, strict=True):
            indices = []
            for sides, count in zip(part, counts, strict=True):
                own = [next(ids) for _ in range(count)]
                indices += own
                for j in range(len(sides[0])):
                    cache[own[j // size], :, j % size] = [side[j] for side in sides]
            last = [(len(k) - 1) % size + 1 if len(k) else 0 for k, _ in part]
            tables.append((offsets(counts), np.array(indices, np.int32), np.array(last, np.int32)))
        return cache, tables

    def truth(self, seen: list[list[int]] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """O and lse; `seen` are the tokens that each row sees, where neither all nor the causal ones count."""
        heads, _, dim = self.sizes
        extra: dict[str, Any] = {}
        if self.mode == "ROPE_LLAMA":
            extra = {"rope_theta": 1e4}
        if self.mode == "ALIBI":
            extra = {"alibi_slopes": reference.alibi_slopes(heads)}
        o, lse = np.zeros((len(self.q), heads, dim)), np.zeros((len(self.q), heads))
        for r, (b, i) in enumerate((b, i) for b, count in enumerate(self.counts) for i in range(count)):
            k, v = self.tokens[b]
            position = len(k) - self.counts[b] + i
            mask = np.arange(len(k)) <= position if self.causal else np.ones(len(k), bool)
            if seen is not None:
                mask = np.isin(np.arange(len(k)), seen[r])
            o[r], lse[r] = (
                part[0]
                for part in reference.masked_attention(
                    self.q[r : r + 1],
                    k[None],
                    v[None],
                    np.zeros((1, 1), np.uint32),
                    np.zeros(1, np.int32),
                    np.array([len(k)], np.int32),
                    row_positions=np.array([position], np.int32),
                    mask=np.packbits(mask, bitorder="little"),
                    mask_starts=np.zeros(1, np.int64),
                    **extra,
                    **self.options,
                )
            )
        return o, lse

    def check(self, found: Found, seen: list[list[int]] | None = None) -> None:
        o, lse = self.truth(seen)
        rel = max(O_TOLERANCE[self.q.dtype.name], O_TOLERANCE[self.dtypes["kv_data_type"]])
        assert_close(as_numpy(found[0], "o"), o, rel=rel, what="o")
        if found[1] is not None:
            assert_lse_close(as_numpy(found[1], "lse"), lse, tol=LSE_TOLERANCE, what="lse")


def levels(flat: Flat, cuts: tuple[int, ...]) -> Found:
    """A cascade of the shared tokens, and of the others cut at so many tokens after them."""
    bottom, ends = offsets(flat.counts), [flat.shared, *(flat.shared + cut for cut in cuts), None]
    parts = [flat.part(0, flat.shared)[:1]] if flat.tokens else [[]]
    parts += [flat.part(begin or 0, end) for begin, end in pairwise(ends)]
    cache, tables = flat.paged(*parts)
    rows = [bottom[[0, -1]], *[bottom] * (len(parts) - 1)]
    wrapper = cascade.MultiLevelCascadeAttentionWrapper(len(parts), None)
    arrays = [list(arrays) for arrays in zip(*tables, strict=True)]
    wrapper.plan(rows, *arrays, *flat.sizes, flat.page_size, flat.causal, flat.mode, **flat.options, **flat.dtypes)
    found: Found = wrapper.run(flat.q, cache, return_lse=True)
    return found


def shared_prefix(flat: Flat) -> Found:
    cache, (table,) = flat.paged(flat.part(flat.shared, None))
    wrapper = cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None)
    wrapper.begin_forward(offsets(flat.counts), *table, *flat.sizes, flat.page_size)
    k, v = flat.part(0, flat.shared)[0]
    return wrapper.forward(flat.q, k, v, cache, flat.causal), None


def paged(flat: Flat, custom_mask: Any = None) -> Found:
    cache, (table,) = flat.paged(flat.tokens)
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(None)
    named: dict[str, Any] = {"causal": flat.causal, "pos_encoding_mode": flat.mode, "custom_mask": custom_mask}
    wrapper.plan(offsets(flat.counts), *table, *flat.sizes, flat.page_size, **named, **flat.options, **flat.dtypes)
    return wrapper.run_return_lse(flat.q, cache)


def mla(flat: Flat) -> Found:
    """Keys that are the values beside a rotary part of zeros: of a V of its own, MLA knows nothing."""
    cache, ((indptr, indices, _),) = flat.paged(flat.tokens)
    heads, _, dim = flat.sizes
    wrapper = BatchMLAPagedAttentionWrapper(None)
    arrays = (offsets(flat.counts), indptr, indices, np.array(flat.lengths, np.int32))
    wrapper.plan(*arrays, heads, dim, 8, flat.page_size, flat.causal, dim**-0.5, **flat.dtypes)
    zeros = np.zeros((*flat.q.shape[:2], 8), flat.q.dtype)
    ckv = cache[:, 0, :, 0]
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if "float8" in ckv.dtype.name else {}
    found: Found = wrapper.run(flat.q, zeros, ckv, np.zeros_like(ckv[..., :8]), return_lse=True, **scales)
    return found


def dense_decode(flat: Flat) -> Found:
    cache, ((indptr, indices, _),) = flat.paged(flat.tokens)
    table = np.full((len(flat.counts), int(np.diff(indptr).max(initial=0)) + 1), -1, np.int32)
    for b, (begin, end) in enumerate(pairwise(indptr)):
        table[b, : end - begin] = indices[begin:end]
    lengths = np.array(flat.lengths, np.int32)
    named: dict[str, Any] = {"kv_layout": "NHD", "cum_seq_lens_q": offsets(flat.counts), "return_lse": True}
    scale = flat.sizes[2] ** -0.5
    window = flat.options["window_left"]
    found: Found = trtllm_batch_decode_with_kv_cache(
        flat.q, cache, None, table, lengths, max(flat.lengths), scale, 1.0, window, **named
    )
    return found


ENTRIES: dict[str, Callable[[Flat], Found]] = {
    "levels": lambda flat: levels(flat, (3,)),
    "shared prefix": shared_prefix,
    "mla": mla,
    "dense decode": dense_decode,
}
"""Levels have every option of position, the next two none but the causal one; a dense decode's rows are tokens, or of
requests without any.
"""


@st.composite
def drawn(draw: st.DrawFn, entry: str, pair: tuple[str, str]) -> Flat:
    is_mla, decodes, moves = entry == "mla", entry == "dense decode", entry == "levels"
    hk, group = (1, 16) if is_mla else draw(st.sampled_from(((1, 1), (2, 1), (1, 3), (2, 2), (1, 16), (2, 8))))
    dim = draw(st.sampled_from((8, 24, 64, 128)))
    shared = draw(st.integers(0, 6) | st.sampled_from((15, 16, 17, 33, 64)))
    own = st.integers(0, 5) | st.sampled_from((15, 16, 17, 33, 64, 65))
    lengths = [shared + length for length in draw(st.lists(own, min_size=1, max_size=4))]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if decodes:
        lengths = [length for length in lengths if length != shared] + [0] * (len(lengths) % 2) or [0]
        shared = 0
        most = min([length for length in lengths if length] or [3])
        counts = [draw(st.integers(1, min(most, 9)))] * len(lengths)
    else:
        counts = [draw(st.integers(0, 3) | st.integers(0, length + 20)) for length in lengths]
    prefix = [normal(rng, (shared, hk, dim), pair[1]) for _ in range(2)]
    tokens = []
    for length in lengths:
        sides = [np.concatenate([start, normal(rng, (length - shared, hk, dim), pair[1])]) for start in prefix]
        tokens.append((sides[0], sides[0] if is_mla else sides[1]))
    options = {
        "window_left": draw(st.sampled_from((-1, -1, 0, 3, 40))) if moves or decodes else -1,
        "logits_soft_cap": draw(st.sampled_from((0.0, 25.0))) if moves else 0.0,
    }
    return Flat(
        normal(rng, (sum(counts), hk * group, dim), pair[0]),
        counts,
        tokens,
        shared,
        draw(st.sampled_from((1, 5, 16, 64))),
        decodes or draw(st.booleans()),
        draw(st.sampled_from(("NONE", "ROPE_LLAMA", "ALIBI"))) if moves else "NONE",
        options,
    )


PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))
MERGES = ("levels", "shared prefix")
QUIET: Any = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": [*HealthCheck]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "pair"),
    [
        pytest.param(entry, pair, id=f"{entry}, {' over '.join(pair)}", marks=[pytest.mark.slow] if own else [])
        for pair in PAIRS
        for entry in ENTRIES
        for own in [entry in MERGES and pair[0] != "float32"]  # which are merged in float32, by a variant of their own
    ],
)
def test_every_wrapper_agrees_with_one_flat_context(entry: str, pair: tuple[str, str]) -> None:
    @settings(max_examples=examples(60), **QUIET)
    @given(drawn(entry, pair))
    def check(flat: Flat) -> None:
        flat.check(ENTRIES[entry](flat))

    check()


@pytest.mark.slow
@settings(max_examples=examples(60), **QUIET)
@given(drawn("levels", PAIRS[0]), st.integers(0, 2**16))
def test_custom_masks_agree_with_the_tokens_that_they_show(flat: Flat, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(n) < 0.5 for n, count in zip(flat.lengths, flat.counts, strict=True) for _ in range(count)]
    mask = np.concatenate([np.zeros(0, bool), *masks])
    flat.check(paged(flat, mask), [np.flatnonzero(row).tolist() for row in masks])


@pytest.mark.parametrize(("rows", "causal", "mode"), [(5, False, "ROPE_LLAMA"), (17, True, "NONE")])
def test_a_cascade_of_more_rows_than_tokens(rows: int, causal: bool, mode: str) -> None:
    """The first rows stand before all tokens: ROPE rotates by their distance, and causal ones see nothing."""
    rng = np.random.default_rng(1)
    tokens = [(normal(rng, (3, 2, 24), "float32"), normal(rng, (3, 2, 24), "float32"))]
    options = {"window_left": -1, "logits_soft_cap": 0.0}
    flat = Flat(normal(rng, (rows, 4, 24), "float32"), [rows], tokens, 3, 4, causal, mode, options)
    flat.check(levels(flat, ()))
    np.testing.assert_allclose(levels(flat, ())[0], paged(flat)[0], rtol=1e-4, atol=1e-5)
