"""Append and gather against the oracle, bit for bit: what they write and return, and that no more is written."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv import reference
from support import harness, tiers
from support.cases import DTYPES, PAGE_SIZES, STORAGES, UNUSED_PAGE, CacheCase, build, emptied, permuted
from support.compare import assert_bits_equal
from support.grids import LENGTHS, all_pairs, case_of, setting_id, tokens_of
from support.properties import examples

GRID = all_pairs(
    {
        "dtype": DTYPES,
        "storage": STORAGES,
        "page_size": PAGE_SIZES,
        "num_kv_heads": (1, 2, 3, 8),
        "head_dim": (7, 8, 64, 80, 128),  # both take any
        "lengths": LENGTHS,
        "order": ("as they are", "shuffled", "shuffled among padding"),
    }
)


def padded(tokens, rng):
    """`tokens` with four rows of NaN among them that must be skipped, whatever their position says."""
    k, v, batch, positions = tokens
    where = np.sort(rng.integers(0, len(k) + 1, 4))
    return (
        np.insert(k, where, np.nan, axis=0),
        np.insert(v, where, np.nan, axis=0),
        np.insert(batch, where, -1),
        np.insert(positions, where, [0, -5, 2**31 - 1, 3]),
    )


def assert_same_memory(actual, expected, what):
    for name, a, e in zip(("k_blocks", "v_blocks"), actual.pages[:2], expected.pages[:2], strict=True):
        assert_bits_equal(a, e, what=f"{name} after {what}")


def gathered(cache, lengths=None):
    """Gathers with the op and with the oracle, compares, and returns K and V; the cache must stay as it was."""
    lengths = cache.lengths if lengths is None else lengths
    before = [array.copy() for array in cache.pages]
    results = harness.gather(*cache.pages, lengths, **cache.storage)
    expected = reference.gather(*cache.pages, lengths, **cache.storage)
    for name, actual, e in zip(("k", "v", "indptr"), results, expected, strict=True):
        assert_bits_equal(actual, e, what=f"{name} of {cache.case}")
    for array, copy in zip(cache.pages, before, strict=True):
        assert_bits_equal(array, copy, what="cache after a gather")
    return results[:2]


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_grid(setting):
    full = build(case_of(setting))
    rng = np.random.default_rng(0)
    tokens = tokens_of(full)
    if setting["order"] != "as they are":
        order = rng.permutation(len(tokens[0]))
        tokens = tuple(column[order] for column in tokens)
    if setting["order"] == "shuffled among padding":
        tokens = padded(tokens, rng)
    actual, expected = emptied(full), emptied(full)
    harness.append(*tokens, *actual.pages, **actual.storage)
    reference.append(*tokens, *expected.pages, **expected.storage)
    assert_same_memory(actual, expected, "an append")
    assert_same_memory(actual, full, "an append of all that a full cache holds")
    for cache in full, permuted(full, rng):
        k, v = gathered(cache)
        assert_bits_equal(k, np.concatenate(full.keys), what="k against the tokens")
        assert_bits_equal(v, np.concatenate(full.values), what="v against the tokens")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["none", "padding only"])
@pytest.mark.parametrize("lengths", [(), (0, 0), (7, 0, 30)], ids=str)
def test_nothing_to_write(dtype, rows, lengths):
    cache = build(CacheCase(lengths=lengths, dtype=dtype, rank=6))
    tokens = tuple(column[:0] for column in tokens_of(cache))
    if rows == "padding only":
        tokens = padded(tokens, np.random.default_rng(0))
    before = replace(cache, k_blocks=cache.k_blocks.copy(), v_blocks=cache.v_blocks.copy())
    harness.append(*tokens, *cache.pages, **cache.storage)
    assert_same_memory(cache, before, "an append of nothing")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_arrives(dtype):
    """NaN payloads, infinities, subnormal numbers and -0 are copied, not converted."""
    size = np.dtype(dtype).itemsize
    bits = np.arange(0, 2**16, dtype=np.uint16) if size == 2 else np.arange(0, 2**32, 2**16 + 3, dtype=np.uint64)
    k = bits[: len(bits) // 16 * 16].astype(f"u{size}").view(dtype).reshape(-1, 2, 8)
    cache = emptied(build(CacheCase(lengths=(len(k),), num_q_heads=2, head_dim=8, page_size=16, dtype=dtype, rank=5)))
    tokens = k, k[::-1], np.zeros(len(k), np.int32), np.arange(len(k), dtype=np.int32)
    harness.append(*tokens, *cache.pages, **cache.storage)
    for side, tokens_of_side in zip(gathered(cache), (k, k[::-1]), strict=True):
        assert_bits_equal(side, tokens_of_side, what="gathered bits")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("rank", "layout"), STORAGES)
def test_nothing_to_gather(dtype, lengths, rank, layout):
    k, v = gathered(build(CacheCase(lengths=lengths, dtype=dtype, rank=rank, layout=layout)))
    assert k.shape == v.shape == (0, 2, 32)


def test_a_part_of_each_request_is_gathered():
    """Fewer tokens than the pages hold: table entries past the needed pages are not looked at."""
    cache = build(CacheCase(lengths=(23, 9, 0, 40), page_size=5))
    cache.lookup_table[0, 2:] = UNUSED_PAGE
    gathered(cache, np.array([10, 9, 0, 1], np.int32))


@settings(max_examples=examples(100), derandomize=True, deadline=None)
@given(data=st.data())
def test_any_step(data):
    """New tokens of each request after those it has, in any order among padding; then everything is gathered."""
    draw = data.draw
    rank, layout = draw(st.sampled_from(STORAGES))
    page_size = draw(st.integers(1, 20))
    full = build(
        CacheCase(
            lengths=tuple(draw(st.lists(st.integers(0, 4 * page_size), max_size=5))),
            num_q_heads=4,
            num_kv_heads=draw(st.sampled_from([1, 2, 4])),
            head_dim=draw(st.integers(1, 72)),
            page_size=page_size,
            rank=rank,
            layout=layout,
            dtype=draw(st.sampled_from(tiers.of(DTYPES))),
        )
    )
    old = np.array([draw(st.integers(0, length)) for length in full.case.lengths], np.int32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = tokens_of(full)
    _, _, batch, positions = tokens
    is_old = positions < old[batch]
    cache = emptied(full)
    reference.append(*(column[is_old] for column in tokens), *cache.pages, **cache.storage)
    order = rng.permutation(np.flatnonzero(~is_old))
    harness.append(*padded(tuple(column[order] for column in tokens), rng), *cache.pages, **cache.storage)
    assert_same_memory(cache, full, "a step")
    for side, tokens_of_side in zip(gathered(cache), tokens, strict=False):
        assert_bits_equal(side, tokens_of_side, what="gathered tokens")
