"""Appends and the arithmetic of page tables, on arrays of every library, against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from api.paging import all_tokens, blocks, expected_blocks, page_table
from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    reshape_and_cache_flash,
)
from support.cases import CacheCase, build, emptied, normal
from support.kinds import PLACED, bytes_of, make
from support.properties import examples

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")
INDICES = ("int32", "int64", "uint32")


def made(kind, given):
    return tuple(make(kind, a) for a in given) if isinstance(given, tuple) else make(kind, given)


@st.composite
def appends(draw: st.DrawFn, min_length: int = 0):
    """A cache, some of its tokens in any order with padding rows between them, and how to pass it all."""
    case = CacheCase(
        tuple(draw(st.lists(st.integers(min_length, 40), max_size=5))),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 20)),
        page_size=draw(st.sampled_from([1, 2, 5, 16, 64])),
        rank=draw(st.sampled_from([4, 5])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 99)),
    )
    cache = emptied(build(case))
    k, v, batch, positions = all_tokens(cache)
    chosen = draw(st.lists(st.integers(0, len(k) - 1), unique=True, max_size=50)) if len(k) else []
    padding = np.array(draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen))), bool)
    batch = np.where(padding, -1, batch[chosen]).astype(np.int32)
    return cache, (k[chosen], v[chosen], batch, positions[chosen])


@pytest.mark.parametrize("kind", PLACED)
@settings(max_examples=examples(60), derandomize=True, deadline=None)
@given(appends(), st.sampled_from(INDICES[:2]), st.booleans(), st.booleans())
def test_any_append_is_the_oracles(kind, drawn, index_dtype, by_name, host_indices):
    cache, rows = drawn
    expected = expected_blocks(cache, *rows)
    storage = made(kind, blocks(cache))
    names = (
        "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr kv_last_page_len".split()
    )
    k, v, batch, positions = rows
    indices = [array.astype(index_dtype) for array in (batch, positions, *page_table(cache))]
    at_batch, at, *table = (make("numpy" if host_indices else kind, array) for array in indices)
    arguments = [make(kind, k), make(kind, v), at_batch, at, storage, *table]
    before = bytes_of([*arguments[:4], *arguments[5:]])
    if by_name:
        append_paged_kv_cache(**dict(zip(names, arguments, strict=True)), kv_layout=cache.case.layout)
    else:
        append_paged_kv_cache(*arguments, cache.case.layout)
    assert bytes_of(storage) == bytes_of(expected)
    assert bytes_of([*arguments[:4], *arguments[5:]]) == before


@pytest.mark.parametrize("kind", PLACED)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
@given(appends(), st.sampled_from(INDICES[:2]), st.integers(0, 2))
def test_numbered_slots_are_those_of_positions(kind, drawn, index_dtype, surplus):
    """Rows past the last slot do not count, as in vLLM."""
    drawn_cache, (k, v, batch, positions) = drawn
    cache = emptied(build(replace(drawn_cache.case, rank=4, layout="NHD")))
    expected, size = expected_blocks(cache, k, v, batch, positions), cache.case.page_size
    pages = cache.lookup_table.view(np.int32)[np.maximum(batch, 0), positions // size] if len(batch) else positions
    slots = np.where(batch < 0, -1, pages.astype(np.int64) * size + positions % size).astype(index_dtype)
    k, v = (np.concatenate([rows, np.ones((surplus, *rows.shape[1:]), rows.dtype)]) for rows in (k, v))
    storage = made(kind, blocks(cache))
    reshape_and_cache_flash(make(kind, k), make(kind, v), *storage, make(kind, slots), "auto", 1.0, 1.0)
    assert bytes_of(storage) == bytes_of(expected)


@pytest.mark.parametrize("kind", PLACED)
@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(appends(), st.data(), st.sampled_from(INDICES))
def test_the_older_form_appends_the_last_tokens(kind, drawn, data, index_dtype):
    cache, _ = drawn
    counts = [data.draw(st.integers(0, length)) for length in cache.case.lengths]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shape = (int(offsets[-1]), cache.case.num_kv_heads, cache.case.head_dim)
    k, v = (normal(np.random.default_rng(seed), shape, cache.case.dtype) for seed in (1, 2))
    rows = reference.ragged_rows(offsets, cache.lengths - np.array(counts, np.int32), shape[0])
    expected = expected_blocks(cache, k, v, *rows)
    storage = made(kind, blocks(cache))
    tables = [make(kind, a) for a in (offsets.astype(index_dtype), *page_table(cache, index_dtype))]
    if data.draw(st.booleans()):
        append_paged_kv_cache(make(kind, k), make(kind, v), tables[0], storage, *tables[1:], cache.case.layout)
    else:
        names = dict(zip("append_indptr kv_indices kv_indptr kv_last_page_len".split(), tables, strict=True))
        append_paged_kv_cache(make(kind, k), make(kind, v), kv_data=storage, kv_layout=cache.case.layout, **names)
    assert bytes_of(storage) == bytes_of(expected)
    # The positions that one signature works out are those that the other is given.
    lengths = get_seq_lens(tables[2], tables[3], cache.case.page_size)
    batch, positions = get_batch_indices_positions(tables[0], lengths, shape[0] + 3)
    assert as_numpy(batch, "b").tolist() == [*rows[0].tolist(), -1, -1, -1]
    assert as_numpy(positions, "p").tolist() == [*rows[1].tolist(), 0, 0, 0]


@pytest.mark.parametrize("kind", PLACED)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
@given(appends(min_length=1), st.sampled_from(INDICES), st.booleans())
def test_the_dense_form_appends_one_token_each(kind, drawn, index_dtype, by_name):
    cache, _ = drawn
    before = cache.lengths - 1  # the last token is the one that comes
    size = cache.case.page_size
    k, v, batch, positions = all_tokens(cache)
    last = positions == before[batch]
    k, v = k[last], v[last]
    expected = expected_blocks(cache, k, v, np.arange(len(k), dtype=np.int32), before)
    page_table = np.where(cache.lookup_table == 0xFFFFFFFF, -1, cache.lookup_table.astype(np.int64))
    page_table = cache.lookup_table if index_dtype == "uint32" else page_table.astype(index_dtype)
    fill = (before % size).astype(index_dtype)
    storage = made(kind, blocks(cache))
    arguments = [make(kind, a) for a in (k, v)], [make(kind, a) for a in (page_table, fill)]
    if by_name:
        names = dict(zip(("page_table", "last_page_len"), arguments[1], strict=True))
        append_paged_kv_cache(*arguments[0], kv_cache=storage, page_size=size, kv_layout=cache.case.layout, **names)
    else:
        append_paged_kv_cache(*arguments[0], storage, *arguments[1], size, cache.case.layout)
    assert bytes_of(storage) == bytes_of(expected)
    assert as_numpy(get_seq_lens(*arguments[1], size), "lengths").tolist() == before.tolist()


@pytest.mark.parametrize("kind", ["torch", "gpu"])
def test_rows_that_lie_in_the_cache_are_read_before_they_are_overwritten(kind):
    del kind  # where the tensors lie
    k_cache, v_cache = (torch.arange(first, first + 4.0).reshape(4, 1, 1, 1) for first in (0, 10))
    page_table, empty = torch.tensor([[1], [2], [3]]), torch.zeros(3, dtype=torch.int32)
    append_paged_kv_cache(k_cache[:3, 0], v_cache[:3, 0], (k_cache, v_cache), page_table, empty, 1)
    assert k_cache.flatten().tolist() == [0, 0, 1, 2]
    assert v_cache.flatten().tolist() == [10, 10, 11, 12]


@pytest.mark.parametrize("kind", PLACED)
def test_nothing_to_append_is_nothing_done(kind):
    rows, none = make(kind, np.zeros((0, 2, 8), np.float16)), make(kind, np.zeros(0, np.int32))
    cache = make(kind, np.ones((3, 2, 4, 2, 8), np.float16))
    before = bytes_of(cache)
    offsets = make(kind, np.zeros(1, np.int32))
    append_paged_kv_cache(rows, rows, none, none, cache, none, offsets, none)
    append_paged_kv_cache(rows, rows, none, none, cache, *(make(kind, np.array(a)) for a in ([1], [0, 1], [4])))
    append_paged_kv_cache(
        rows, rows, make(kind, np.zeros(1, np.int32)), cache, none, make(kind, np.zeros(1, int)), none
    )
    append_paged_kv_cache(rows, rows, cache, make(kind, np.zeros((0, 3), np.int32)), none, 4)
    skipped = make(kind, np.full(2, -1, np.int32))
    row = make(kind, np.zeros((2, 2, 8), np.float16))
    append_paged_kv_cache(row, row, skipped, skipped, cache, none, offsets, none)
    assert bytes_of(cache) == before
    assert as_numpy(get_seq_lens(make(kind, np.zeros(1, np.int32)), none, 16), "lengths").shape == (0,)


@pytest.mark.parametrize("kind", PLACED)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
@given(appends(), st.integers(1, 70), st.booleans())
def test_mla_rows_of_two_widths(kind, drawn, kpe_width, one_array):
    cache, (_, _, batch, positions) = drawn
    size, width, dtype = cache.case.page_size, cache.case.head_dim, cache.case.dtype
    rng = np.random.default_rng(0)
    caches = [np.full((len(cache.k_blocks), size, w), np.nan, dtype) for w in (width, kpe_width)]
    rows = [normal(rng, (len(batch), w), dtype) for w in (width, kpe_width)]
    expected = [c.copy() for c in caches]
    for target, row in zip(expected, rows, strict=True):
        reference.append(row[:, None], row[:, None], batch, positions, *[target[:, :, None]] * 2, cache.lookup_table)
    if one_array:  # as the latent and the rotary part of one storage: strided
        both = np.concatenate(caches, axis=2)
        both = both if kind != "gpu" else make(kind, both)
        targets = [both[..., :width], both[..., width:]]
    else:
        targets = [make(kind, c) for c in caches]
    arguments = [make(kind, a) for a in (*rows, batch, positions)]
    append_paged_mla_kv_cache(*arguments, *targets, *(make(kind, a) for a in page_table(cache)))
    assert bytes_of(targets) == bytes_of(expected)


@pytest.mark.parametrize("widths", [(128, 128), (512, 64)])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("kind", ["torch", "gpu"])
def test_the_dense_mla_form_fills_one_cache_with_both(kind, heads, widths):
    del kind  # where the tensors lie
    between = () if heads is None else (heads,)
    cache = torch.zeros(6, 4, *between, sum(widths), dtype=torch.bfloat16)
    k, v = (torch.randn(2, *between, width).bfloat16() for width in widths)
    table, fill = torch.tensor([[5, 2], [1, -1]]), torch.tensor([3, 0])
    append_paged_mla_kv_cache(k, v, cache, table, fill, 4)
    assert torch.equal(cache[[2, 1], [3, 0]], torch.cat([k, v], dim=-1))
    assert torch.count_nonzero(cache) == torch.count_nonzero(k) + torch.count_nonzero(v)
